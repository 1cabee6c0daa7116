"""Renders a job as a batch script to read, or to submit by hand to repeat the job.

In a container, a node's command runs through options of srun (pyxis) or a command before it (Apptainer), rendered as
their manuals describe. Neither has been tested on a real cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import ClusterConfig, ContainerConfig
from flows.launch.base import Job, export_lines, quote
from flows.launch.endings import token_file
from hlatctl import node, warm
from hlatctl.allocation import NODE_LIST_ENV, TOKEN_ENV, ended_file
from hlatctl.run.errors import ERROR_FILE_ENV, ConfigError
from hlatctl.run.processes import NODE_NAME_ENV, node_python
from hlatctl.run.state import TRAIN_JOB


@dataclass(frozen=True, kw_only=True)
class Container:
    """What a container adds to a job's script.

    Args:
        python: runs the node's command.
        srun: options of srun.
        before: words before the node's command.
        lines: lines of the script before srun.
    """

    python: str
    srun: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    lines: str = ""


def container(job: Job, settings: ContainerConfig, names: list[str]) -> Container:
    """Return what a job's container adds to its script; nothing without an image.

    Args:
        job: job to run inside. The runs folder is mounted, because every job needs it.
        names: names of the job's variables, which override those of the image.

    Raises:
        ConfigError: the runs folder's path can't be written in a mount option.
    """
    if not settings.image:
        return Container(python=node_python())
    runs_dir = os.fspath(job.run_dir.parent)
    if any(separator in runs_dir for separator in ":,"):
        raise ConfigError(
            f"runs_dir={runs_dir}: must not contain ':' or ',', because it is mounted into the container",
            hint="use another runs_dir",
        )
    mounts = (f"{runs_dir}:{runs_dir}", *settings.mounts)
    if settings.runtime == "pyxis":
        options = (
            f"--container-image={settings.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-env={','.join(names)}",
            *settings.options,
        )
        return Container(python=settings.python, srun=options)
    prefix = f"{settings.runtime.upper()}ENV"
    binds = tuple(f"--bind={mount}" for mount in mounts)
    return Container(
        python=settings.python,
        before=(settings.runtime, "exec", *binds, *settings.options, settings.image),
        lines=f'for name in {" ".join(names)}; do export "{prefix}_$name=${{!name}}"; done\n',
    )


#: Name of the Slurm job that keeps nodes, in the folder of an allocation.
ALLOCATION = "nodes"
#: From 20000 to 32767: Linux uses ports from 32768 for outgoing connections (ip-sysctl.rst).
_FIRST_PORT, _PORTS = 20_000, 12_768
#: Options of sbatch that request devices, and the numbers in their values: ``8``, ``gpu:8``, ``gpu:h100:8,nvme:1``.
_DEVICES, _NUMBER = re.compile(r"--(gpus(-per-[a-z]+)?|gres|tres-per-[a-z]+)="), re.compile(r"(?<=[:=])\d+(?=,|$)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BACKSLASH = "\\"


def job_name(launch_dir: str, name: str) -> str:
    """Return the scheduler's name of a job: the place of its records, so that it is found again without its number.

    Unusual characters are written as in URLs, because Slurm drops backslashes and prints names in lists.
    """
    return f"hlatctl:{urllib.parse.quote(f'{launch_dir}/{name}', safe='/')}"


def environment_file(base: Path) -> Path:
    """Return the file that names the archive of the environment for a job's nodes, and where to unpack it."""
    return base.with_name(f"{base.name}.environment")


def script(job: Job, cluster: ClusterConfig) -> str:
    """Return a job's script. A separate Slurm job uses all of its nodes; an allocation names the nodes to use.

    Raises:
        ConfigError: an option can't be written into a script.
    """
    base = job.launch_dir / job.name
    token, ended = (shlex.quote(os.fspath(path)) for path in (token_file(base), ended_file(base)))
    options, log = directives(_options(job, cluster)), shlex.quote(os.fspath(job.log))
    env = {**job.env, ERROR_FILE_ENV: os.fspath(job.error_file)}
    if job.processes_per_node:
        env[node.LOG_ENV] = os.fspath(job.log)
        if cluster.stage_environment:
            env[node.ENVIRONMENT_ENV] = os.fspath(environment_file(base))
    if cluster.interface:
        env[node.INTERFACE_ENV] = cluster.interface
    inside = container(job, cluster.container, sorted(env))
    command = " ".join(filter(None, ("exec", quote(inside.before), _command(job, base, inside.python))))
    on_node = f"{node.NODE_RANK_ENV}=$SLURM_NODEID {NODE_NAME_ENV}=$SLURMD_NODENAME {command}"
    # --overlap: the step of a node that was lost holds its other nodes for a while.
    srun = (
        "srun",
        "--overlap",
        "--kill-on-bad-exit=1",
        f"--output={pattern(job.run_dir, job.log)}",
        "--open-mode=append",
        *inside.srun,
    )
    setup, waits = _setup(cluster), ""
    if may_be_warm(job, cluster):
        # --no-kill: a lost node ends no others.
        wait = (inside.python, "-m", "hlatctl.node", "--warm", "--", *_starts(job, inside.python))
        on_each = shlex.quote(f"{NODE_NAME_ENV}=$SLURMD_NODENAME exec {quote(wait)}")
        waits = f"""# An allocation also runs this script to have processes import, and wait for jobs.
if [ "${warm.STARTS_ENV}" ]; then
  {"[ $prepared = 0 ] || exit 1; " if setup else ""}exec srun --overlap --no-kill --nodelist="$nodes" \\
    --nodes=${node.NODES_ENV} --ntasks=${node.NODES_ENV} sh -c {on_each}
fi
"""
    placed = f'--nodes=${node.NODES_ENV} --ntasks=${node.NODES_ENV} --nodelist="$nodes"'
    return f"""#!/bin/bash
{options}# Job {job.name}, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
{_unless_given_up(token)}
# What srun itself says belongs into the job's log too.
exec >>{log} 2>&1
trap : TERM
{setup}{export_lines(env, job.unset)}{inside.lines}nodes=${{{NODE_LIST_ENV}:-$SLURM_JOB_NODELIST}}
export {node.NODES_ENV}=$(scontrol show hostnames "$nodes" | wc -l)
export {node.MASTER_ADDR_ENV}=$(scontrol show hostnames "$nodes" | head -n 1)
# A free port that nobody can foresee, below those that Linux gives to connections (net.ipv4.ip_local_port_range).
for try in 1 2 3 4 5 6 7 8; do
  export {node.MASTER_PORT_ENV}=$(({_FIRST_PORT} + $(od -An -N2 -tu2 /dev/urandom) % {_PORTS}))
  cat /proc/net/tcp* | grep -q "^ *[0-9]*: [0-9A-F]*:$(printf %04X ${node.MASTER_PORT_ENV}) " || break
done
# A task has the whole node, but a site may bind it to a core. Where Slurm can't bind, srun complains about the option.
scontrol show config | grep -q '^TaskPlugin .*affinity' && export SLURM_CPU_BIND=none
{waits}{"[ $prepared = 0 ] && " if setup else ""}{quote(srun)} \\
  {placed} \\
  sh -c {shlex.quote(on_node)}
code=$?
echo "{{\\"v\\": 1, \\"code\\": $code}}" >{ended}.tmp && mv {ended}.tmp {ended}
exit $code
"""


def allocation_script(job: Job, cluster: ClusterConfig, folder: Path) -> str:
    """Return the batch script that keeps nodes for a job and for later ones.

    Args:
        job: job with the hosts that it must not use.
        cluster: cluster with the number of nodes, and of spare ones.

    Raises:
        ConfigError: an option can't be written into a script.
    """
    settings, most = cluster.slurm, cluster.nodes + cluster.spare_nodes
    options = [
        f"--job-name={job_name(os.fspath(folder), ALLOCATION)}",
        f"--nodes={cluster.nodes}{f'-{most}' if cluster.spare_nodes else ''}",
        "--no-kill",
        *_common(job, cluster, folder / f"{ALLOCATION}.log"),
        *_training(job, cluster),
    ]
    if settings.time_limit_s:
        options.append(f"--time={clock(settings.time_limit_s)}")
    options.append(f"--signal=TERM@{settings.stop_before_limit_s}")  # also before the partition's limit
    if job.excluded_hosts:
        options.append(f"--exclude={','.join(job.excluded_hosts)}")
    token = shlex.quote(os.fspath(token_file(folder / ALLOCATION)))
    setup = f"{lines}[ $prepared = 0 ] || exit 1\n" if (lines := _setup(cluster)) else ""
    program = (node_python(), "-m", "hlatctl.allocation", os.fspath(folder), str(settings.idle_release_s))
    return f"""#!/bin/bash
{directives(options)}# Written by hlatctl: keeps nodes for a run, and runs there what its driver orders in this folder.
# An allocation that its driver has given up does nothing.
{_unless_given_up(token)}
{setup}export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
exec {quote(program)}
"""


def _setup(cluster: ClusterConfig) -> str:
    """Return the lines that prepare a job's environment; its own variables follow and win."""
    settings, steps, lines = cluster.slurm, [], ""
    if settings.modules:
        lines = "# A shell that isn't a login shell may not have Environment Modules or Lmod yet.\n"
        lines += "type module >/dev/null 2>&1 || . /etc/profile\n"
        steps.append(f"module load {quote(tuple(settings.modules))}")
    if settings.setup_script:
        steps.append(f". {shlex.quote(settings.setup_script)}")
    return f"{lines}{' && '.join(steps)}\nprepared=$?\n" if steps else ""


def _unless_given_up(token: str) -> str:
    return f'[ -z "${TOKEN_ENV}" ] || [ "${TOKEN_ENV}" = "$(cat {token})" ] || exit 0'


def _options(job: Job, cluster: ClusterConfig) -> list[str]:
    settings = cluster.slurm
    on_all = bool(job.processes_per_node or job.each_node)
    options = [
        f"--job-name={job_name(os.fspath(job.launch_dir), job.name)}",
        f"--nodes={job.nodes if on_all else 1}",
        "--ntasks-per-node=1",
        *_common(job, cluster, job.log),
    ]
    if settings.time_limit_s and not job.partition:  # another partition has limits of its own
        options.append(f"--time={clock(settings.time_limit_s)}")
    if job.name == TRAIN_JOB:  # other jobs have nothing to save
        options.append(f"--signal=TERM@{settings.stop_before_limit_s}")  # also before the partition's limit
    options += _training(job, cluster)
    options += [*device_options(job.devices, job.options, cluster), *job.options]
    if job.excluded_hosts:
        options.append(f"--exclude={','.join(job.excluded_hosts)}")
    return options


def device_options(devices: int, own: Sequence[str], cluster: ClusterConfig) -> list[str]:
    """Return the options with which a job of one node requests devices: those of training, with smaller numbers.

    If training names no devices and gets them with its nodes, the job takes a node alone too.

    Args:
        devices: number of devices that it uses.
        own: the job's options; if they name devices, nothing is added.
        cluster: cluster configuration of training.
    """
    if not devices or any(_DEVICES.match(option) for option in own):
        return []
    wanted = [option for option in cluster.slurm.device_options if _DEVICES.match(option)]
    if not wanted:
        return ["--exclusive"] if cluster.slurm.exclusive and "--exclusive" not in own else []
    return [_share(option, devices, cluster) for option in wanted]


def _share(option: str, devices: int, cluster: ClusterConfig) -> str:
    """Return an option with the job's share of devices. ``--gpus`` counts those of all nodes (sbatch(1))."""
    processes = cluster.processes_per_node * (cluster.nodes if option.startswith("--gpus=") else 1)
    return _NUMBER.sub(lambda number: str(-(-int(number[0]) * devices // processes)), option)


def _common(job: Job, cluster: ClusterConfig, log: Path) -> list[str]:
    given = cluster.slurm.selection
    if job.partition:  # another partition has nodes of its own
        given = {**given, "partition": job.partition}
        given = {name: value for name, value in given.items() if name not in ("reservation", "constraint")}
    own = ("--no-requeue", "--open-mode=append", f"--output={pattern(job.run_dir, log)}")
    return [*own, *(f"--{name}={value}" for name, value in given.items())]


def _training(job: Job, cluster: ClusterConfig) -> list[str]:
    if not job.processes_per_node:
        return []
    return [*(["--exclusive"] if cluster.slurm.exclusive else []), *cluster.slurm.device_options]


def pattern(run_dir: Path, log: Path) -> str:
    """Return a log's file name for Slurm, with doubled percent signs.

    Raises:
        ConfigError: Slurm can't write a file of that name.
    """
    path = os.fspath(log)
    if "\\" in path:
        raise ConfigError(
            f"runs_dir={run_dir.parent}: must not contain a backslash, because Slurm drops it from names of files",
            hint="use another runs_dir",
        )
    return path.replace("%", "%%")


def directives(options: list[str]) -> str:
    """Return the lines of a script with options of sbatch.

    Raises:
        ConfigError: an option would end its line.
    """
    return "".join(f"{_directive(option)}\n" for option in options)


def _directive(option: str) -> str:
    """Return a line with an option of sbatch, which reads it without a shell; a backslash escapes the next character.

    Raises:
        ConfigError: the option would end the line.
    """
    if _CONTROL.search(option):
        raise ConfigError(
            f"{option!r}: must not contain a line break or another control character: it is an option of sbatch",
            hint="remove it from the value; `hlatctl plan` prints the script",
        )
    return f"#SBATCH {shlex.quote(option.replace(_BACKSLASH, 2 * _BACKSLASH))}"


def _command(job: Job, base: Path, python: str) -> str:
    program = (python, "-m", "hlatctl.node", os.fspath(base), "--")
    if not job.processes_per_node:
        return quote((*program, python, *job.argv))
    return quote((*program, *_starts(job, python)))


def _starts(job: Job, python: str) -> tuple[str, ...]:
    """Return the command that starts a node's ranks."""
    wrapper = (python, *job.wrapper) if job.wrapper else ()
    count = job.processes_per_node
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={count}")
    forking = ("-m", "trainer.launch", str(count), *(f"--import={name}" for name in job.shared_modules))
    return (*wrapper, python, *(forking if job.shared_modules else torchrun), *job.argv)


def may_be_warm(job: Job, cluster: ClusterConfig) -> bool:
    """Return whether a job's ranks may be forked by processes that wait on its nodes (``hlatctl.warm``).

    Containers may have process ids and folders of their own.
    """
    return bool(job.stays and job.shared_modules and job.keeps_nodes) and not cluster.container.image


def clock(seconds: int) -> str:
    """Return a time as Slurm's options have it."""
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
