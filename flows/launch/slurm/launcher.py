"""Jobs on a Slurm cluster: submitted by sbatch, found again by name, asked to stop by a file.

A job's name is the place of its records; its comment is a token that is on the disk before sbatch runs. So a driver
that dies while it submits leaves either no job or one that the next driver finds.
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from signal import Signals

from conf.schema import ClusterConfig
from flows.launch.base import Handle, Job, Plan, Status
from flows.launch.slurm import script as scripts
from flows.launch.slurm.commands import Queue, Row, SchedulerAwayError, hosts_of, scancel, slurm
from flows.launch.slurm.endings import NodeRecord, conclude, node_records
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.errors import LaunchError, cannot_write
from hlatctl.run.reading import DAMAGED

_POLL_S = 0.2
#: A job that has been cancelled is asked about until it has ended; nodes that do not answer take minutes.
_HOSTS_FOR_S = 60.0
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
#: A job that ends within the grace of a pre-emption or of its time limit has one of these states.
_ENDED_BY_ITSELF = ("COMPLETED", "FAILED")
_PREEMPTED = re.compile(r"\bPreemptTime=\d")
#: Slurm sends the signal before the time limit up to this much earlier (sbatch(1), --signal).
_EARLY_S = 60
_UNUSABLE = ("down", "drain", "fail", "unk", "inval", "maint", "power", "reboot", "planned")


class SlurmLauncher:
    """Starts jobs on a Slurm cluster.

    Args:
        cluster: as the configuration says.
    """

    name = "slurm"
    weighs_jobs = False

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster, self._queue = cluster, Queue()
        self._hosts: tuple[str, ...] = ()
        self._hosts_asked_s = -_HOSTS_FOR_S

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """The partition's nodes that can run jobs, whether or not one runs there now."""
        if time.monotonic() - self._hosts_asked_s >= _HOSTS_FOR_S:
            partition = self._cluster.slurm.partition
            words = ("sinfo", "-h", "-N", "-o", "%N|%T", *(("-p", partition) if partition else ()))
            try:
                states = dict(line.split("|", 1) for line in slurm(*words).splitlines())
            except SchedulerAwayError:
                return self._hosts
            usable = (host for host, state in states.items() if not state.startswith(_UNUSABLE))
            self._hosts, self._hosts_asked_s = tuple(sorted(usable)), time.monotonic()
        return self._hosts

    def render(self, job: Job) -> Plan:
        """The job as a batch script."""
        script = scripts.script(job, self._cluster)
        return Plan(job=job, script=script, script_path=job.launch_dir / f"{job.name}.sh")

    def handle(self, plan: Plan) -> Handle:
        """The job's place: its launch folder and name."""
        return Handle(launcher=self.name, name=plan.job.name, launch_dir=os.fspath(plan.job.launch_dir))

    def submit(self, plan: Plan) -> Handle:
        """Submit the script; returns once the scheduler has taken it.

        Raises:
            StorageError: its files can't be written; nothing has been submitted.
            LaunchError: the scheduler refuses it, or does not answer.
        """
        handle, token = self.handle(plan), uuid.uuid4().hex
        try:
            _prepare(plan, handle, token)
        except OSError as error:
            place = f"job {plan.job.name}: {error.filename or plan.job.launch_dir}"
            hint = "free space, or repair the storage, then `hlatctl resume`"
            raise cannot_write(place, error, hint=hint) from None
        slurm("sbatch", f"--comment={token}", f"--export=ALL,{scripts.TOKEN_ENV}={token}", os.fspath(plan.script_path))
        self._queue.hurry()
        return handle

    def status(self, handle: Handle) -> Status:
        """From the record that the batch script writes last, else from the scheduler."""
        base, token = _base(handle), _token(handle)
        code = _ended(base)
        if code == 0 and not self._asked_from_outside(base):
            return conclude("", 0, node_records(base))
        try:
            # After a bad end the scheduler's own account matters, and its last answer is from before.
            row = self._queue.job(_name(handle), token, now=code is not None) if token else None
            if row and row.state in _WAITS:
                return Status(state="queued", reason=row.reason, expected_start_unix_s=_time(row.start))
            if row and row.state in _RUNS:
                return Status(state="running", hosts=hosts_of(row.nodes))
            code = _ended(base)  # it may have ended between the two looks
            records = node_records(base)
            hosts = hosts_of(row.nodes) if row else ()
            down = self._down(hosts or [record.host for record in records]) if code != 0 else ()
            state = self._state(base, row, records) if row else ""
        except SchedulerAwayError:
            return Status(state="unknown", reason="the scheduler does not answer")
        return conclude(state, code, records, down, row.reason if row else "", hosts)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask the nodes' programs to stop the job; after the grace, have Slurm end it; return when it has ended."""
        if not _token(handle):
            return
        row = self._lives(handle)
        if grace_s and row and row.state not in _WAITS:
            self._order(handle, "stop")
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and _ended(_base(handle)) is None and self._lives(handle, now=False):
                time.sleep(_POLL_S)
        while row := self._lives(handle):
            scancel(row.id)
            time.sleep(_POLL_S)
        if _ended(_base(handle)) is None:  # an sbatch of a dead driver may come late
            files.write_text(scripts.token_file(_base(handle)), f"given up {_token(handle)}\n")

    def dump_stacks(self, handle: Handle) -> str:
        """By the nodes' programs, which ask the ranks below them."""
        records = node_records(_base(handle))
        self._order(handle, "stacks")
        return f"{len(records)} nodes asked to have their processes print their stacks into their logs"

    def signal(self, handle: Handle, number: Signals | None) -> None:
        """Signal all processes of a job; None: cancel it, as an administrator does."""
        if row := self._lives(handle):
            scancel(*([f"--signal={number.name.removeprefix('SIG')}"] if number else []), row.id)

    def run_beside(self, handle: Handle, rank: int, *argv: str) -> None:
        """Run ``python`` on a node of a job that runs, beside the job's own step.

        Raises:
            LaunchError: the job does not run, or the command fails.
        """
        row, records = self._lives(handle), node_records(_base(handle))
        if row is None or len(records) <= rank:
            raise LaunchError(f"job {handle.name}: does not run on node {rank}")
        one = ("--nodes=1", "--ntasks=1", f"--nodelist={records[rank].host}")
        slurm("srun", "--overlap", f"--jobid={row.id}", *one, sys.executable, *argv)

    def oom_kills(self) -> int | None:
        """Each node tells its own, in its record of the end."""
        return None

    def _asked_from_outside(self, base: Path) -> bool:
        """Whether a job was asked to stop, and not by us: the scheduler says why."""
        try:
            ours = files.read_json(node.orders(base))["what"] == "stop"
        except (OSError, *DAMAGED):
            ours = False
        return not ours and any(record.asked_to_stop for record in node_records(base))

    def _state(self, base: Path, row: Row, records: list[NodeRecord]) -> str:
        """Return the state of an ended job; of one that ended by itself within its grace, why it was asked to stop."""
        if row.state not in _ENDED_BY_ITSELF or not self._asked_from_outside(base):
            return row.state
        try:
            if _PREEMPTED.search(slurm("scontrol", "--oneliner", "show", "job", row.id)):
                return "PREEMPTED"
        except SchedulerAwayError:
            raise
        except LaunchError:
            pass  # forgotten meanwhile
        limit_s, early_s = self._cluster.slurm.time_limit_s, self._cluster.slurm.stop_before_limit_s + _EARLY_S
        ran_s = max(record.wall_s for record in records)
        return "TIMEOUT" if limit_s and ran_s > limit_s - early_s else row.state

    def _order(self, handle: Handle, what: str) -> None:
        files.write_json(node.orders(_base(handle)), {"v": 1, "what": what, "id": uuid.uuid4().hex})

    def _lives(self, handle: Handle, *, now: bool = True) -> Row | None:
        """The job as the scheduler knows it, if it waits or runs; waits for a scheduler that does not answer."""
        while True:
            try:
                row = self._queue.job(_name(handle), "", now=now)
            except SchedulerAwayError:
                time.sleep(1.0)
                continue
            return row if row and row.state in (*_WAITS, *_RUNS) else None

    def _down(self, hosts: Sequence[str]) -> tuple[str, ...]:
        if not hosts:
            return ()
        text = slurm("sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N|%T")
        states = dict(line.split("|", 1) for line in text.splitlines())
        return tuple(host for host in hosts if states.get(host, "").startswith(("down", "fail")))


def _prepare(plan: Plan, handle: Handle, token: str) -> None:
    """Write the script and the token; what an earlier job of this name has left is removed."""
    job, base = plan.job, _base(handle)
    job.launch_dir.mkdir(parents=True, exist_ok=True)
    records = (path for kind in ("pid", "exit_code") for path in job.launch_dir.glob(f"{job.name}.node-*.{kind}"))
    own = (node.record(base, "pid"), node.record(base, "exit_code"), scripts.ended_file(base), node.orders(base))
    for stale in (*own, *records, job.error_file):
        stale.unlink(missing_ok=True)
    files.write_text(plan.script_path, plan.script)
    job.log_dir.mkdir(parents=True, exist_ok=True)
    job.log.touch()
    files.write_text(scripts.token_file(base), f"{token}\n")


def _base(handle: Handle) -> Path:
    return Path(handle.launch_dir) / handle.name


def _name(handle: Handle) -> str:
    return scripts.job_name(handle.launch_dir, handle.name)


def _token(handle: Handle) -> str:
    """Of the newest job of this handle; empty if none was ever to be submitted."""
    try:
        return scripts.token_file(_base(handle)).read_text(encoding="utf-8").split()[-1]
    except (OSError, IndexError):
        return ""


def _ended(base: Path) -> int | None:
    try:
        return int(files.read_json(scripts.ended_file(base))["code"])
    except (OSError, *DAMAGED):
        return None


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None  # N/A
