"""The nodes that a run keeps on a Slurm cluster: one Slurm job, an allocation, in which the run's jobs run as rounds.

An allocation is a folder next to the launch folders of attempts, ``launch/allocation-0001``: its script, its token, and
the files of :mod:`hlatctl.allocation`, its batch program. The newest folder counts. A job that runs in an allocation
has a file ``JOB.round``, which names the folder and the round. A run that got the nodes of another run has a link to
the other run's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from conf.cluster_rules import SIGNAL_EARLY_S
from conf.schema import ClusterConfig, SlurmConfig
from flows.launch.base import Allocation, AwayError, Job, JobPlan
from flows.launch.endings import give_up, read_token, token_file
from flows.launch.slurm import script as scripts
from flows.launch.slurm.commands import RUNS, WAITS, Queue, SlurmJob, hosts_of, node_states, patiently, scancel, slurm
from flows.launch.slurm.drivers import fit_next
from flows.launch.slurm.limits import least_time_s, maintenances, next_maintenance, seconds, useful_s
from hlatctl.allocation import TOKEN_ENV, UNUSABLE, Order, Round, read_cut, rounds
from hlatctl.driver_job import PLACE_ENV
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import train_writer
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import TRAIN_JOB


@dataclass(frozen=True, kw_only=True)
class Folder:
    """An allocation on the disk."""

    path: Path

    @property
    def job_name(self) -> str:
        """The name of its Slurm job."""
        return scripts.job_name(os.fspath(self.path), scripts.ALLOCATION)

    @property
    def token(self) -> str:
        """The comment of its Slurm job; empty if none was ever about to be submitted."""
        return read_token(self.path / scripts.ALLOCATION)

    @property
    def closed(self) -> bool:
        """Whether it accepts no further round."""
        return any((self.path / name).exists() for name in ("released", "closed"))

    def release(self) -> None:
        """Let its program end after the current round."""
        (self.path / "released").touch()

    def give_up(self) -> None:
        """Make its script do nothing if a dead driver's sbatch arrives late."""
        give_up(self.path / scripts.ALLOCATION)

    def submit(self, script: str, least_s: int | None = None) -> None:
        """Submit its job, whose name and token are already on the disk.

        Args:
            least_s: Slurm may shorten the job's time to this; None: it may not.
        """
        token, path = uuid.uuid4().hex, self.path / f"{scripts.ALLOCATION}.sh"
        files.write_text(path, script)
        files.write_text(token_file(self.path / scripts.ALLOCATION), f"{token}\n")
        least = [f"--time-min={scripts.clock(least_s)}"] if least_s else []
        slurm("sbatch", *least, f"--comment={token}", f"--export=ALL,{TOKEN_ENV}={token}", os.fspath(path))

    def next_round(self) -> Round:
        """Return the number of a round that was never ordered."""
        return Round(folder=self.path, number=max((each.number for each in rounds(self.path)), default=0) + 1)

    @property
    def cut_hosts(self) -> tuple[str, ...]:
        """Its hosts that were found cut off, which it doesn't use any more."""
        return read_cut(self.path / "cut").hosts

    @property
    def has_trained(self) -> bool:
        """Whether a training attempt was ever ordered here."""
        return (self.path / "trained").exists()

    def note_training(self) -> None:
        """Note that a training attempt was ordered here."""
        (self.path / "trained").touch()


def newest(launch: Path) -> Folder | None:
    """Return the newest allocation in a run's folder ``launch``."""
    known = sorted(launch.glob("allocation-[0-9]*"))
    return _folder(known[-1]) if known else None


def _folder(place: Path) -> Folder:
    """Return an allocation with the path that its Slurm job is named by, also if another run got it first."""
    return Folder(path=place.readlink() if place.is_symlink() else place)


def pass_on(run_dir: Path, to: Path) -> None:
    """Give a run's newest allocation to another run that has none (``Launcher.pass_on``)."""
    folder = newest(RunPaths(run_dir).launch(0).parent)
    if folder and not folder.closed:
        launch = RunPaths(to).launch(0).parent
        launch.mkdir(parents=True, exist_ok=True)
        (launch / folder.path.name).symlink_to(folder.path)


def following(launch: Path) -> Folder:
    """Return the folder for the next allocation."""
    last = newest(launch)
    number = int(last.path.name.removeprefix("allocation-")) if last else 0
    return Folder(path=launch / f"allocation-{number + 1:04d}")


def order_of(job: Job, script: Path, token: str, imports: str = "") -> Order:
    """Return the order for a round, which runs the job."""
    return Order(
        script=os.fspath(script),
        token=token,
        nodes=job.nodes,
        all_nodes=job.all_nodes,
        excluded=job.excluded_hosts,
        avoided=job.avoided_hosts,
        imports=imports,
        progress=os.fspath(RunPaths(job.run_dir).journal / f"{train_writer(0)}.jsonl"),
    )


def is_alive(row: SlurmJob | None) -> bool:
    """Return whether an allocation waits for nodes or can run rounds. It can't if the host of its program was lost."""
    return row is not None and (row.state in WAITS or (row.state in RUNS and row.batch_host in hosts_of(row.nodes)))


def fits(folder: Folder, row: SlurmJob | None, job: Job, unusable: Collection[str], settings: SlurmConfig) -> bool:
    """Return whether a job can run in an allocation.

    An allocation that has not trained yet is never too short of time: a new one would be no longer.
    """
    if folder.closed or row is None or row.state not in (*WAITS, "RUNNING") or not is_alive(row):
        return False
    if row.state in WAITS:
        return True
    if job.name == TRAIN_JOB and folder.has_trained:
        left_s = seconds(row.left)
        if left_s is not None and left_s <= settings.stop_before_limit_s + SIGNAL_EARLY_S:
            return False
    return bool(order_of(job, Path(), "").choose(hosts_of(row.nodes), unusable))


def write_round(base: Path, round_: Round) -> None:
    """Record the round in which a job runs."""
    files.write_json(round_file(base), {"v": 1, "allocation": round_.folder.name, "round": round_.number})


def round_of(base: Path) -> Round | None:
    """Return the round in which a job runs; None: it is a Slurm job of its own."""
    try:
        value = files.read_json(round_file(base))
        return Round(folder=_folder(base.parent.parent / str(value["allocation"])).path, number=int(value["round"]))
    except (OSError, *DAMAGED):
        return None


def round_file(base: Path) -> Path:
    """Return the file that records a job's round."""
    return base.with_name(f"{base.name}.round")


_POLL_S = 0.1
#: Seconds between two looks for maintenance on the nodes of a running job.
_LOOK_EVERY_S = 300.0
#: A part of Slurm's reason for a job that only a maintenance keeps from starting.
_FOR_MAINTENANCE = "maintenance"
_STARTED = re.compile(r"\bStartTime=(\S+)")
#: Time for an allocation's program to accept a round.
_TAKES_S = 30.0


class KeptNodes:
    """Gets, uses and releases the nodes of runs."""

    def __init__(self, cluster: ClusterConfig, queue: Queue) -> None:
        self._cluster, self._queue = cluster, queue
        self._looked_s = -_LOOK_EVERY_S

    def fitting(self, job: Job) -> Allocation | None:
        """Return the nodes that are kept for a job's run and that it can use."""
        folder = newest(job.launch_dir.parent)
        if folder is None:
            return None
        row, unusable = self._row_of(folder), _unusable(folder)
        if row is None or not fits(folder, row, job, unusable, self._cluster.slurm):
            return None
        hosts = hosts_of(row.nodes) if row.state in RUNS else ()
        return Allocation(name=folder.path.name, hosts=tuple(host for host in hosts if host not in unusable))

    def release(self, run_dir: Path) -> None:
        """Let the allocation end after the current round; cancel its Slurm job if it waits or has lost its program."""
        folder = newest(RunPaths(run_dir).launch(0).parent)
        if folder is None:
            return
        with contextlib.suppress(OSError):  # a full disk
            folder.release()
        try:
            row = self._queue.job(folder.job_name, "", now=True)
        except AwayError:
            return  # its program reads the file
        if row and (row.state in WAITS or not folder.closed or not is_alive(row)):
            scancel(row.id)

    def order_round(self, plan: JobPlan, token: str) -> None:
        """Order a job's round in a fitting allocation, or else in a new one."""
        base, launch = plan.job.launch_dir / plan.job.name, plan.job.launch_dir.parent
        while True:
            folder = self._kept(plan.job) or self._new(plan, launch)
            round_ = folder.next_round()
            write_round(base, round_)
            imports = plan.job.imported if scripts.may_be_warm(plan.job, self._cluster) else ""
            round_.write(order_of(plan.job, plan.script_path, token, imports))
            if self._accepted(folder, round_) or not round_.move("withdrawn"):
                if plan.job.name == TRAIN_JOB:
                    folder.note_training()
                return

    def _accepted(self, folder: Folder, round_: Round) -> bool:
        """Wait until an allocation that is not queued accepts a round; return False if it ends instead."""
        deadline = time.monotonic() + _TAKES_S
        while round_.waits and time.monotonic() < deadline:
            row = self._row_of(folder, now=False)
            if folder.closed or (row is not None and not is_alive(row)):
                return False
            if row and row.state in WAITS:
                return True
            time.sleep(_POLL_S)
        return True

    def _kept(self, job: Job) -> Folder | None:
        folder = newest(job.launch_dir.parent)
        if folder is None:
            return None
        row = self._row_of(folder)
        if fits(folder, row, job, _unusable(folder), self._cluster.slurm):
            return folder
        folder.release()
        folder.give_up()
        if row and row.state in (*WAITS, *RUNS):
            scancel(row.id)
        return None

    def _new(self, plan: JobPlan, launch: Path) -> Folder:
        folder = following(launch)
        folder.submit(
            scripts.allocation_script(plan.job, self._cluster, folder.path), least_time_s(self._cluster, time.time())
        )
        self._queue.hurry()
        return folder

    def end_before_maintenance(self, row: SlurmJob) -> None:
        """Shorten a job that would reach into a maintenance, so that Slurm starts it and asks it to stop before.

        One that waits was submitted before the maintenance was announced, or else Slurm could shorten it by itself.
        Slurm reserves nodes of running jobs only if an administrator told it to ignore them.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if place := os.environ.get(PLACE_ENV):
            with contextlib.suppress(HlatctlError):
                fit_next(Path(place), self._cluster, time.time())
        with contextlib.suppress(HlatctlError):
            if row.state in WAITS:
                if _FOR_MAINTENANCE in row.reason and (found := next_maintenance(self._cluster, time.time())):
                    limit_s = int(found[0].start_unix_s - time.time()) - 60  # Slurm counts in minutes
                    if limit_s > useful_s(self._cluster):
                        slurm("scontrol", "update", f"JobId={row.id}", f"TimeLimit={limit_s // 60}")
                return
            coming = maintenances(time.time())
            hosts = set(hosts_of(row.nodes))
            starts = [one.start_unix_s for one in coming if hosts.intersection(hosts_of(one.hosts))]
            left_s = seconds(row.left)
            if starts and (left_s is None or time.time() + left_s > starts[0]):
                shown = _STARTED.search(slurm("scontrol", "--oneliner", "show", "job", row.id))
                began_unix_s = datetime.fromisoformat(shown[1]).timestamp() if shown else time.time()
                slurm("scontrol", "update", f"JobId={row.id}", f"TimeLimit={int(starts[0] - began_unix_s) // 60}")

    def _row_of(self, folder: Folder, *, now: bool = True) -> SlurmJob | None:
        return patiently(lambda: self._queue.job(folder.job_name, folder.token, now=now))


def _unusable(folder: Folder) -> set[str]:
    states = patiently(node_states).items()
    return {*folder.cut_hosts, *(host for host, state in states if state.startswith(UNUSABLE))}
