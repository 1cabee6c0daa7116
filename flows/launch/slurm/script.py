"""A job as a batch script that a person can read, and submit by hand to repeat it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from conf.schema import ClusterConfig
from flows.launch.base import Job, export_lines, quote
from hlatctl import node
from hlatctl.run.errors import ERROR_FILE_ENV
from hlatctl.run.host import NODE_NAME_ENV

TOKEN_ENV = "HLATCTL_TOKEN"


def job_name(launch_dir: str, name: str) -> str:
    """What the scheduler calls a job: the place of its records, so that it is found again without its number."""
    return f"hlatctl:{launch_dir}/{name}".replace(" ", "_").replace("|", "_")


def token_file(base: Path) -> Path:
    """Holds what the script compares with its own token, so that a job that was given up does nothing."""
    return base.with_name(f"{base.name}.token")


def ended_file(base: Path) -> Path:
    """Where the batch script writes, last, the exit code of srun."""
    return base.with_name(f"{base.name}.ended")


def script(job: Job, cluster: ClusterConfig) -> str:
    """The batch script of a job."""
    base = job.launch_dir / job.name
    token, ended = (shlex.quote(os.fspath(path)) for path in (token_file(base), ended_file(base)))
    directives = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in _options(job, cluster))
    env = {**job.env, ERROR_FILE_ENV: os.fspath(job.error_file)}
    if cluster.interface:
        env[node.INTERFACE_ENV] = cluster.interface
    on_node = f"{node.NODE_RANK_ENV}=$SLURM_NODEID {NODE_NAME_ENV}=$SLURMD_NODENAME exec {_command(job, base)}"
    return f"""#!/bin/bash
{directives}# Job {job.name}, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
[ -z "${TOKEN_ENV}" ] || [ "${TOKEN_ENV}" = "$(cat {token})" ] || exit 0
trap : TERM
{export_lines(env, job.unset)}export {node.NODES_ENV}=$SLURM_JOB_NUM_NODES
export {node.MASTER_ADDR_ENV}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export {node.MASTER_PORT_ENV}=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 --output={shlex.quote(os.fspath(job.log))} --open-mode=append \\
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
        f"--output={job.log}",
        *(f"--{name}={value}" for name, value in given.items() if value),
    ]
    if settings.time_limit_s and not job.partition:  # another partition has limits of its own
        options += [f"--time={_clock(settings.time_limit_s)}", f"--signal=TERM@{settings.stop_before_limit_s}"]
    if job.processes_per_node:
        options += [*(["--exclusive"] if settings.exclusive else []), *settings.extra]
    options += job.options
    if job.excluded_hosts:
        options.append(f"--exclude={','.join(job.excluded_hosts)}")
    return options


def _command(job: Job, base: Path) -> str:
    program = (sys.executable, "-m", "hlatctl.node", os.fspath(base), "--")
    if not job.processes_per_node:
        return quote((*program, sys.executable, *job.argv))
    wrapper = (sys.executable, *job.wrapper) if job.wrapper else ()
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={job.processes_per_node}", "--tee=3")
    logs = f"--log-dir={shlex.quote(os.fspath(job.log_dir / job.name))}/node-$SLURM_NODEID"
    return f"{quote((*program, *wrapper, sys.executable, *torchrun))} {logs} {quote(job.argv)}"


def _clock(seconds: int) -> str:
    """Hours, minutes and seconds, as sbatch takes them."""
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
