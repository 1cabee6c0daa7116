"""A job as a batch script that a person can read, and submit by hand to repeat it."""

from __future__ import annotations

import os
import re
import shlex
import urllib.parse
from pathlib import Path

from conf.schema import ClusterConfig
from flows.launch.base import Job, export_lines, quote
from flows.launch.slurm.container import container
from hlatctl import node
from hlatctl.run.errors import ERROR_FILE_ENV, ConfigError
from hlatctl.run.host import NODE_NAME_ENV
from hlatctl.run.state import TRAIN_JOB

TOKEN_ENV = "HLATCTL_TOKEN"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BACKSLASH = "\\"


def job_name(launch_dir: str, name: str) -> str:
    """What the scheduler calls a job: the place of its records, so that it is found again without its number.

    Unusual characters are written as in URLs, because Slurm drops backslashes and prints names in lists.
    """
    return f"hlatctl:{urllib.parse.quote(f'{launch_dir}/{name}', safe='/')}"


def token_file(base: Path) -> Path:
    """Holds what the script compares with its own token, so that a job that was given up does nothing."""
    return base.with_name(f"{base.name}.token")


def ended_file(base: Path) -> Path:
    """Where the batch script writes, last, the exit code of srun."""
    return base.with_name(f"{base.name}.ended")


def script(job: Job, cluster: ClusterConfig) -> str:
    """The batch script of a job.

    Raises:
        ConfigError: an option can't be written into a script.
    """
    base = job.launch_dir / job.name
    token, ended = (shlex.quote(os.fspath(path)) for path in (token_file(base), ended_file(base)))
    directives = "".join(f"{_directive(option)}\n" for option in _options(job, cluster))
    env = {**job.env, ERROR_FILE_ENV: os.fspath(job.error_file)}
    if cluster.interface:
        env[node.INTERFACE_ENV] = cluster.interface
    inside = container(job, cluster.container, sorted(env))
    command = " ".join(filter(None, ("exec", quote(inside.before), _command(job, base, inside.python))))
    on_node = f"{node.NODE_RANK_ENV}=$SLURM_NODEID {NODE_NAME_ENV}=$SLURMD_NODENAME {command}"
    srun = ("srun", "--kill-on-bad-exit=1", f"--output={_pattern(job)}", "--open-mode=append", *inside.srun)
    return f"""#!/bin/bash
{directives}# Job {job.name}, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
[ -z "${TOKEN_ENV}" ] || [ "${TOKEN_ENV}" = "$(cat {token})" ] || exit 0
trap : TERM
{export_lines(env, job.unset)}{inside.lines}export {node.NODES_ENV}=$SLURM_JOB_NUM_NODES
export {node.MASTER_ADDR_ENV}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export {node.MASTER_PORT_ENV}=$((20000 + SLURM_JOB_ID % 20000))
{quote(srun)} \\
  sh -c {shlex.quote(on_node)}
code=$?
echo "{{\\"v\\": 1, \\"code\\": $code}}" >{ended}.tmp && mv {ended}.tmp {ended}
exit $code
"""


def _options(job: Job, cluster: ClusterConfig) -> list[str]:
    settings = cluster.slurm
    on_all = bool(job.processes_per_node or job.each_node)
    given = {"partition": job.partition or settings.partition, "account": settings.account, "qos": settings.qos}
    options = [
        f"--job-name={job_name(os.fspath(job.launch_dir), job.name)}",
        f"--nodes={job.nodes if on_all else 1}",
        "--ntasks-per-node=1",
        "--no-requeue",
        "--open-mode=append",
        f"--output={_pattern(job)}",
        *(f"--{name}={value}" for name, value in given.items() if value),
    ]
    if settings.time_limit_s and not job.partition:  # another partition has limits of its own
        options.append(f"--time={_clock(settings.time_limit_s)}")
        if job.name == TRAIN_JOB:  # the others have nothing to save
            options.append(f"--signal=TERM@{settings.stop_before_limit_s}")
    if job.processes_per_node:
        options += [*(["--exclusive"] if settings.exclusive else []), *settings.extra]
    options += job.options
    if job.excluded_hosts:
        options.append(f"--exclude={','.join(job.excluded_hosts)}")
    return options


def _pattern(job: Job) -> str:
    """Return the name of the job's log as Slurm reads it: with a doubled percent sign.

    Raises:
        ConfigError: Slurm can't write a file of that name.
    """
    path = os.fspath(job.log)
    if "\\" in path:
        raise ConfigError(
            f"runs_dir={job.run_dir.parent}: must not contain a backslash, because Slurm drops it from names of files",
            hint="use another runs_dir",
        )
    return path.replace("%", "%%")


def _directive(option: str) -> str:
    """Return a line with an option of sbatch, which reads it without a shell; a backslash keeps the next character.

    Raises:
        ConfigError: it would end the line.
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
    wrapper = (python, *job.wrapper) if job.wrapper else ()
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={job.processes_per_node}", "--tee=3")
    logs = f"--log-dir={shlex.quote(os.fspath(job.log_dir / job.name))}/node-$SLURM_NODEID"
    return f"{quote((*program, *wrapper, python, *torchrun))} {logs} {quote(job.argv)}"


def _clock(seconds: int) -> str:
    """Hours, minutes and seconds, as sbatch takes them."""
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
