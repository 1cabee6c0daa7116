"""A run's driver or evaluator as a Slurm job: script, submission, where it is, and its end (``hlatctl.driver_job``).

All of its jobs have the same name and ``--dependency=singleton``, so Slurm runs them one after another. As for the
other jobs of a run, the token is on the disk before sbatch runs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from conf.cluster_rules import SIGNAL_EARLY_S
from conf.schema import ClusterConfig
from flows.launch.base import quote
from flows.launch.slurm import limits
from flows.launch.slurm.commands import RUNS, WAITS, SlurmJob, hosts_of, own_jobs, scancel, slurm
from flows.launch.slurm.script import clock, directives, job_name, pattern
from hlatctl.driver_job import RENEW, DriverJob, script_of, submission
from hlatctl.run import files
from hlatctl.run.errors import LaunchError
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import node_python

_NAME, _WHERE = "slurm", "cluster.slurm.driver"
#: The driver is asked to end so long before its job's time limit.
_RENEW_BEFORE_S = 120
#: A shorter job would be replaced as soon as it drives.
_LEAST_S = 2 * (_RENEW_BEFORE_S + SIGNAL_EARLY_S)
#: Slurm may shorten the job to this part of its limit, an hour of a day. Slurm 22.05's backfill scheduler was seen to
#: give the jobs that it started their least time, even without a reservation. A shorter one means frequent handovers.
_SHORTEST_PART = 24


class SlurmDrivers:
    """Runs drivers as Slurm jobs."""

    def check(self, cluster: ClusterConfig) -> None:
        """Check the job's shape with the scheduler."""
        limits.check_driver(cluster, _shape(cluster), least_s=_LEAST_S)

    def script(self, place: Path, words: Sequence[str], cluster: ClusterConfig) -> str:
        """Return the batch script of a driver."""
        run = RunPaths(place.parent)
        selection, limit_s = limits.driver_cluster(cluster).slurm.selection, _limit_s(cluster)
        options = [
            f"--job-name={_job_name(place)}",
            "--no-requeue",
            "--open-mode=append",
            f"--output={pattern(run.root, run.head_log)}",
            *(f"--{name}={value}" for name, value in selection.items()),
            f"--time={clock(limit_s)}",
            # So that it can start before a reservation.
            f"--time-min={clock(_least_s(limit_s))}",
            f"--signal=B:{RENEW.name.removeprefix('SIG')}@{_RENEW_BEFORE_S}",
            *_shape(cluster),
        ]
        program = (node_python(), "-P", "-m", "hlatctl.driver_job", os.fspath(place), *words)
        return f"""#!/bin/bash
{directives(options)}# Written by hlatctl: drives or evaluates a run, and submits itself again as its successor.
export PYTHONUNBUFFERED=1
exec {quote(program)}
"""

    def submit(self, place: Path, words: Sequence[str], cluster: ClusterConfig) -> str:
        """Submit the driver in place of any earlier one."""
        self.end_waiting(place)
        token, path = uuid.uuid4().hex, script_of(place)
        with files.created_like(place.parent):
            RunPaths(place.parent).head_log.parent.mkdir(exist_ok=True)
            files.write_text(path, self.script(place, words, cluster))
            DriverJob(launcher=_NAME, token=token).write(place)
        try:
            number = slurm(*submission(path, token))
        except LaunchError:
            place.unlink(missing_ok=True)
            raise
        return f"Slurm job {number.strip().partition(';')[0]}"

    def state(self, place: Path) -> str:
        """Return where the jobs of the chain are."""
        known = _jobs(place)
        running = next((job for job in known if job.state in RUNS), None)
        waiting = next((job for job in known if job.state in WAITS), None)
        if running is None:
            return f"Slurm job {waiting.id} waits in the queue ({waiting.reason})" if waiting else ""
        next_one = f"; job {waiting.id} follows it" if waiting else "; no job follows it"
        return f"Slurm job {running.id} runs on {running.nodes}, time left {running.left}{next_one}"

    def end_waiting(self, place: Path) -> None:
        """Let no further job of the chain begin its work, and cancel those that wait."""
        place.unlink(missing_ok=True)
        _cancel(place, WAITS)

    def end(self, place: Path) -> None:
        """Do the same, and end a running job."""
        place.unlink(missing_ok=True)
        _cancel(place, (*WAITS, *RUNS))

    def interrupt(self, place: Path) -> None:
        """Do the same, and stop the command of a running job as Ctrl-C does."""
        self.end_waiting(place)
        _cancel(place, RUNS, "--signal=INT", "--batch")


def fit_next(place: Path, cluster: ClusterConfig, now_unix_s: float) -> None:
    """Let the job that follows a driver's job start before a maintenance, although little time is left until then.

    Its least time is then what is left between the end of the running job and the maintenance. Otherwise Slurm would
    not start it before, and training would have no driver for the last part of its time.
    """
    jobs, nodes = _jobs(place), limits.driver_cluster(cluster)
    running = next((job for job in jobs if job.state in RUNS), None)
    waiting = next((job for job in jobs if job.state in WAITS), None)
    left_s = limits.seconds(running.left) if running else None
    if waiting is None or left_s is None:
        return
    hosts = {host for one in limits.chosen(nodes, limits.partitions(), where=_WHERE) for host in hosts_of(one.hosts)}
    for maintenance in limits.maintenances(now_unix_s):
        if hosts.issubset(hosts_of(maintenance.hosts)):
            ends_unix_s = now_unix_s + left_s - _RENEW_BEFORE_S
            rest_s = int(maintenance.start_unix_s - ends_unix_s) - 60  # Slurm counts in minutes
            if _LEAST_S <= rest_s < _least_s(_limit_s(cluster)):
                slurm("scontrol", "update", f"JobId={waiting.id}", f"TimeMin={rest_s // 60}")
            return


def _least_s(limit_s: int) -> int:
    """Return how far Slurm may shorten a job with this limit."""
    return max(_LEAST_S, limit_s // _SHORTEST_PART)


def _limit_s(cluster: ClusterConfig) -> int:
    """Return the time limit: the configured one, or that of the partition if it is shorter."""
    may = limits.chosen(limits.driver_cluster(cluster), limits.partitions(), where=_WHERE)
    limit_s = cluster.slurm.driver.time_limit_s
    return min(limit_s, *(partition.max_time_s or limit_s for partition in may))


def _shape(cluster: ClusterConfig) -> list[str]:
    own = cluster.slurm.driver
    memory = [f"--mem={own.memory_gib}G"] if own.memory_gib else []
    return ["--nodes=1", "--ntasks=1", f"--cpus-per-task={own.cpus}", *memory, *own.extra]


def _job_name(place: Path) -> str:
    """Return the name of a chain's jobs, which ends with `driver` or `evaluator`."""
    return job_name(os.fspath(place.parent), place.stem.removesuffix("-job"))


def _jobs(place: Path) -> list[SlurmJob]:
    """Return the jobs of a run's driver or evaluator that wait or run, of any chain, oldest first."""
    found = own_jobs(f"--name={_job_name(place)}")
    return sorted((job for job in found if job.state in (*WAITS, *RUNS)), key=lambda job: int(job.id))


def _cancel(place: Path, states: tuple[str, ...], *options: str) -> None:
    """Cancel the jobs of a chain in these states. A scheduler that is away is no error: they do nothing now."""
    with suppress(LaunchError):
        if jobs := [job.id for job in _jobs(place) if job.state in states]:
            scancel(*options, *jobs)
