"""The nodes that a run keeps on a Slurm cluster: one Slurm job at a time, in which its jobs run in turn, as rounds."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from conf.schema import ClusterConfig
from flows.launch.base import Allocation, Job, Plan
from flows.launch.slurm import allocation
from flows.launch.slurm import script as scripts
from flows.launch.slurm.allocation import Folder
from flows.launch.slurm.commands import (
    RUNS,
    WAITS,
    Queue,
    Row,
    SchedulerAwayError,
    hosts_of,
    node_states,
    patiently,
    scancel,
)
from hlatctl.allocation import UNUSABLE, Round
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import TRAIN_JOB

_POLL_S = 0.2
#: Time for an allocation's program to take a round.
_TAKES_S = 30.0


class KeptNodes:
    """Gets, uses and gives back the nodes of runs.

    Args:
        cluster: as the configuration says.
        queue: of the scheduler's jobs.
    """

    def __init__(self, cluster: ClusterConfig, queue: Queue) -> None:
        self._cluster, self._queue = cluster, queue

    def fitting(self, job: Job) -> Allocation | None:
        """The nodes that are kept for a job's run and that can be used."""
        folder = allocation.newest(job.launch_dir.parent)
        if folder is None:
            return None
        row, unusable = self._row_of(folder), _unusable()
        if row is None or not allocation.fits(folder, row, job, unusable, self._cluster.slurm):
            return None
        hosts = hosts_of(row.nodes) if row.state in RUNS else ()
        return Allocation(name=folder.path.name, hosts=tuple(host for host in hosts if host not in unusable))

    def release(self, run_dir: Path) -> None:
        """Its program ends after the round that runs now; a job without its program is cancelled, or one that waits."""
        folder = allocation.newest(RunPaths(run_dir).launch(0).parent)
        if folder is None:
            return
        with contextlib.suppress(OSError):  # a full disk
            folder.release()
        try:
            row = self._queue.job(folder.job_name, "", now=True)
        except SchedulerAwayError:
            return  # its program reads the file
        if row and (row.state in WAITS or not folder.closed or not allocation.is_alive(row)):
            scancel(row.id)

    def order_round(self, plan: Plan, token: str) -> None:
        """Order a job's round in an allocation that fits, or else in a new one."""
        base, launch = plan.job.launch_dir / plan.job.name, plan.job.launch_dir.parent
        while True:
            folder = self._kept(plan.job) or self._new(plan, launch)
            round_ = folder.next_round()
            allocation.write_round(base, round_)
            round_.write(allocation.order_of(plan.job, plan.script_path, token))
            if self._accepted(folder, round_) or not round_.move("withdrawn"):
                if plan.job.name == TRAIN_JOB:
                    folder.note_training()
                return

    def _accepted(self, folder: Folder, round_: Round) -> bool:
        """Wait until an allocation has taken a round, unless it waits itself; return False if it ends instead."""
        deadline = time.monotonic() + _TAKES_S
        while round_.waits and time.monotonic() < deadline:
            row = self._row_of(folder, now=False)
            if folder.closed or (row is not None and not allocation.is_alive(row)):
                return False
            if row and row.state in WAITS:
                return True
            time.sleep(_POLL_S)
        return True

    def _kept(self, job: Job) -> Folder | None:
        """Return the run's allocation if the job can run there; else give it up."""
        folder = allocation.newest(job.launch_dir.parent)
        if folder is None:
            return None
        row = self._row_of(folder)
        if allocation.fits(folder, row, job, _unusable(), self._cluster.slurm):
            return folder
        folder.release()
        folder.give_up()
        if row and row.state in (*WAITS, *RUNS):
            scancel(row.id)
        return None

    def _new(self, plan: Plan, launch: Path) -> Folder:
        folder = allocation.following(launch)
        folder.submit(scripts.allocation_script(plan.job, self._cluster, folder.path))
        self._queue.hurry()
        return folder

    def _row_of(self, folder: Folder, *, now: bool = True) -> Row | None:
        """Return the Slurm job of an allocation."""
        return patiently(lambda: self._queue.job(folder.job_name, folder.token, now=now))


def _unusable() -> set[str]:
    """Return the nodes of the cluster on which no round can start."""
    return {host for host, state in patiently(node_states).items() if state.startswith(UNUSABLE)}
