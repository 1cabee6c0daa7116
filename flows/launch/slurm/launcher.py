"""Jobs on a Slurm cluster: submitted by sbatch, found again by name, asked to stop by a file.

Preflight, compilation and training run in turn in one Slurm job that keeps its nodes (``kept_nodes``); other jobs are
Slurm jobs of their own. A Slurm job's name is the place of its records; its comment is a token that is on the disk
before sbatch runs. So a driver that dies while it submits leaves either no job or one that the next driver finds.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from signal import Signals
from typing import Self

from conf.cluster_rules import SIGNAL_EARLY_S
from conf.schema import ClusterConfig, Config
from flows.launch.base import Allocation, AwayError, Handle, Job, JobPlan, Launcher, PlannedStops, Status, writing
from flows.launch.endings import (
    NodeRecord,
    base_of,
    conclude,
    give_up,
    node_records,
    order,
    order_stacks,
    prepare,
    read_token,
)
from flows.launch.slurm import kept_nodes, limits
from flows.launch.slurm import script as scripts
from flows.launch.slurm.commands import (
    PAUSES,
    RUNS,
    VERDICTS,
    WAITS,
    Accounting,
    Queue,
    SlurmJob,
    hosts_of,
    node_states,
    patiently,
    scancel,
    slurm,
)
from flows.launch.slurm.kept_nodes import Folder, KeptNodes, round_of
from flows.launch.slurm.limits import seconds
from hlatctl.allocation import TOKEN_ENV, Round, asked_from_outside, cut_file, ended_file, read_cut
from hlatctl.cache.environment import Packer
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, HlatctlError, LaunchError
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import environment_dir
from hlatctl.run.processes import node_python

_POLL_S, _LOOK_S = 0.2, 0.1
#: Seconds between two queries for the partition's nodes.
_HOSTS_FOR_S = 60.0
#: Possible states of a job that ends within the grace of a pre-emption or of its time limit.
_ENDED_BY_ITSELF = ("COMPLETED", "FAILED")
_PREEMPTED = re.compile(r"\bPreemptTime=\d")
#: Time for the nodes' programs to end their processes, before Slurm is asked to end the whole job.
_END_S = 30.0
_TIME_LIMIT = re.compile(r"\bTimeLimit=(\S+)")
_UNUSABLE = ("down", "drain", "fail", "unk", "inval", "maint", "power", "reboot", "planned")


class SlurmLauncher(Launcher):
    """Starts jobs on a Slurm cluster."""

    name = "slurm"
    keeps_nodes = True

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster, self._queue, self._accounting = cluster, Queue(), Accounting()
        self._kept, self._packer = KeptNodes(cluster, self._queue), Packer()
        self._hosts: tuple[str, ...] = ()
        self._hosts_asked_s = -_HOSTS_FOR_S
        self._looked_s = 0.0

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the launcher of a configuration (``conf.registries.LAUNCHERS``)."""
        return cls(config.cluster)

    def check_limits(self, config: Config) -> str:
        """Compare the jobs with the limits of their partitions."""
        try:
            limits.check(config.cluster)
            if config.eval.enabled:
                limits.check_evaluations(config)
        except AwayError as error:
            raise AwayError(error.message, hint="see `scontrol ping`, and try again later") from None
        return self.interruption(config)

    def interruption(self, config: Config) -> str:
        """Return which maintenance reservation ends a job of training."""
        try:
            return limits.maintenance_text(config.cluster, time.time())
        except HlatctlError:
            return ""

    def stops(self, config: Config) -> PlannedStops:
        """Return the time limit of a job of training, and the next maintenance reservation."""
        return limits.stops(config.cluster, time.time())

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the nodes of the jobs' partitions that can run jobs, whether or not one is running there now."""
        if time.monotonic() - self._hosts_asked_s >= _HOSTS_FOR_S:
            try:
                may = limits.chosen(self._cluster, limits.partitions())
                states = node_states("-p", ",".join(partition.name for partition in may))
            except (AwayError, ConfigError):
                return self._hosts
            usable = (host for host, state in states.items() if not state.startswith(_UNUSABLE))
            self._hosts, self._hosts_asked_s = tuple(sorted(usable)), time.monotonic()
        return self._hosts

    def render(self, job: Job) -> JobPlan:
        """Return the job as a batch script."""
        script, path, nodes = scripts.script(job, self._cluster), job.launch_dir / f"{job.name}.sh", ""
        if job.keeps_nodes:
            nodes = scripts.allocation_script(job, self._cluster, kept_nodes.following(job.launch_dir.parent).path)
        return JobPlan(job=job, script=script, script_path=path, nodes_script=nodes)

    def submit(self, plan: JobPlan) -> Handle:
        """Submit the script, and return once the scheduler has accepted it."""
        handle, token = self.handle(plan), uuid.uuid4().hex
        base = base_of(handle)
        with writing(plan.job):
            prepare(plan, token, ended_file(base), cut_file(base), kept_nodes.round_file(base))
            if self._cluster.stage_environment and plan.job.processes_per_node:
                self._pack_environment(plan.job)
            if plan.job.keeps_nodes:
                self._kept.order_round(plan, token)
                return handle
        slurm("sbatch", f"--comment={token}", f"--export=ALL,{TOKEN_ENV}={token}", os.fspath(plan.script_path))
        self._queue.hurry()
        return handle

    def _pack_environment(self, job: Job) -> None:
        """Write which environment a job's nodes unpack, and make its archive if there is none yet."""
        record = self._packer.pack(environment_dir(job.run_dir.parent))
        folder = os.path.join(self._cluster.worker_cache_dir, "env")
        files.write_sealed_json(scripts.environment_file(job.launch_dir / job.name), {**record, "folder": folder})

    def status(self, handle: Handle) -> Status:
        """Return the state from the record that the batch script writes last, else from the scheduler."""
        base, round_ = base_of(handle), round_of(base_of(handle))
        code, records = _ended(base), node_records(base)
        good = code == 0 and all(record.code == 0 for record in records)
        if good and not asked_from_outside(base):
            return conclude("", 0, records)
        try:
            # After a bad end the scheduler's view matters, and its last answer is from before the end.
            row = self._job(handle, now=code is not None) if read_token(base) else None
            live = self._live_status(row, round_, code)
            return live or self._conclude(handle, row, round_)
        except AwayError:
            return Status(state="unknown", reason="the scheduler does not answer")

    def _live_status(self, row: SlurmJob | None, round_: Round | None, code: int | None) -> Status | None:
        """Return the state of a job that is still alive; None if it has ended."""
        if round_ and not (kept_nodes.is_alive(row) and (round_.waits or round_.taken)):
            return None
        if round_ and code is not None and row and row.state == "RUNNING":
            return None  # the verdict of a job that is ending follows later
        if row and row.state in WAITS:
            if round_:
                self._kept.end_before_maintenance(row)
            return Status(state="queued", reason=row.reason, expected_start_unix_s=_expected_start(row))
        if row and row.state in PAUSES:
            return Status(state="queued", reason=row.state.lower())
        if row and row.state in RUNS:
            if round_:
                self._kept.end_before_maintenance(row)
            return Status(state="running", hosts=round_.hosts() if round_ else hosts_of(row.nodes))
        return None

    def _conclude(self, handle: Handle, row: SlurmJob | None, round_: Round | None) -> Status:
        base = base_of(handle)
        if row is None and read_token(base):  # the scheduler has forgotten it
            row = self._accounting.job(*_slurm_job(handle), _submitted_unix_s(_script_of(base, round_)))
        code, hosts = _ended(base), round_.hosts() if round_ else hosts_of(row.nodes) if row else ()
        records = node_records(base, len(hosts))
        good = code == 0 and all(record.code == 0 for record in records)
        cut = read_cut(cut_file(base))
        down = () if good else cut.hosts or self._down(hosts or [record.host for record in records])
        state = self._state(base, row, records) if row else ""
        return conclude(VERDICTS.get(state, ""), code, records, down, cut.why or (row.reason if row else ""), hosts)

    def has_ended(self, handle: Handle) -> bool:
        """Return whether the job's script has left its end. Looks ten times a second: storage may be shared."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now_s
        return ended_file(base_of(handle)).exists()

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask the nodes' programs to stop the job, have Slurm end it after the grace, and return when it has ended.

        On a full disk Slurm asks all processes of the job.
        """
        base = base_of(handle)
        if not read_token(base):
            return
        if (round_ := round_of(base)) is None:
            self._cancel_job(handle, grace_s)
        elif not round_.move("withdrawn") and round_.taken and _ended(base) is None:
            self._cancel_round(handle, grace_s)
        if _ended(base) is None:  # a dead driver's sbatch may arrive late
            give_up(base)

    def _cancel_job(self, handle: Handle, grace_s: float) -> None:
        row = self._lives(handle)
        if grace_s and row and row.state not in WAITS:
            if order(base_of(handle), "stop"):
                scancel("--signal=TERM", row.id)
            self._await_end(handle, grace_s)
        while row := self._lives(handle):
            scancel(row.id)
            time.sleep(_POLL_S)

    def _cancel_round(self, handle: Handle, grace_s: float) -> None:
        """End a round and keep its nodes; if its nodes don't end it, end the whole allocation."""
        for what, patience_s in (("stop", grace_s), ("end", _END_S)):
            if patience_s and not order(base_of(handle), what):
                self._await_end(handle, patience_s)
            elif patience_s and what == "stop" and (row := self._lives(handle)):
                scancel("--signal=TERM", row.id)
                self._await_end(handle, patience_s)
        while _ended(base_of(handle)) is None and (row := self._lives(handle)):
            scancel(row.id)
            time.sleep(_POLL_S)

    def _await_end(self, handle: Handle, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _ended(base_of(handle)) is None and self._lives(handle, now=False):
            time.sleep(_POLL_S)

    def allocation(self, job: Job) -> Allocation | None:
        """Return the nodes that are kept for a job's run and that it can use."""
        return self._kept.fitting(job)

    def release(self, run_dir: Path) -> None:
        """Release a run's kept nodes after the current round."""
        self._kept.release(run_dir)

    def pass_on(self, run_dir: Path, to: Path) -> None:
        """Let another run use the nodes that are kept for a run."""
        kept_nodes.pass_on(run_dir, to)

    def dump_stacks(self, handle: Handle) -> str:
        """Ask the nodes' programs, which signal the ranks below them."""
        return order_stacks(base_of(handle))

    def signal(self, handle: Handle, number: Signals | None) -> None:
        """Signal all processes of a job; None: cancel it, as an administrator does."""
        if row := self._lives(handle):
            scancel(*([f"--signal={number.name.removeprefix('SIG')}"] if number else []), row.id)

    def run_beside(self, handle: Handle, rank: int, *argv: str) -> None:
        """Run ``python`` on a node of a running job, alongside the job's own step.

        Raises:
            LaunchError: the job is not running, or the command fails.
        """
        row, records = self._lives(handle), node_records(base_of(handle))
        if row is None or len(records) <= rank:
            raise LaunchError(f"job {handle.name}: does not run on node {rank}")
        one = ("--nodes=1", "--ntasks=1", f"--nodelist={records[rank].host}")
        slurm("srun", "--overlap", f"--jobid={row.id}", *one, node_python(), *argv)

    def _state(self, base: Path, row: SlurmJob, records: list[NodeRecord]) -> str:
        """Return the state of an ended job, with the reason if it was asked to stop.

        A pre-emption moves the end of a job's time to the end of its grace, so Slurm can call that end a time-out.
        """
        within_grace = row.state in (*_ENDED_BY_ITSELF, *RUNS) and asked_from_outside(base)
        if not within_grace and row.state != "TIMEOUT":
            return row.state
        try:
            shown = slurm("scontrol", "--oneliner", "show", "job", row.id)
        except AwayError:
            raise
        except LaunchError:
            shown = ""  # forgotten in the meantime
        if _PREEMPTED.search(shown):
            return "PREEMPTED"
        if not within_grace:
            return row.state
        settings, limit = self._cluster.slurm, _TIME_LIMIT.search(shown)
        limit_s, left_s = seconds(limit[1]) if limit else settings.time_limit_s, seconds(row.left)
        early_s, ran_s = settings.stop_before_limit_s + SIGNAL_EARLY_S, max(record.wall_s for record in records)
        # A round starts later than its allocation, whose remaining time counts.
        near = left_s is not None and left_s <= early_s
        return "TIMEOUT" if near or (limit_s and ran_s > limit_s - early_s) else row.state

    def _job(self, handle: Handle, *, now: bool = False) -> SlurmJob | None:
        return self._queue.job(*_slurm_job(handle), now=now)

    def _lives(self, handle: Handle, *, now: bool = True) -> SlurmJob | None:
        """Return the Slurm job of a waiting or running job; wait for a scheduler that does not answer."""
        row = patiently(lambda: self._job(handle, now=now))
        return row if row and row.state in (*WAITS, *RUNS) else None

    def _down(self, hosts: Sequence[str]) -> tuple[str, ...]:
        if not hosts:
            return ()
        states = node_states("-n", ",".join(hosts))
        return tuple(host for host in hosts if states.get(host, "").startswith(("down", "fail")))


def _name(handle: Handle) -> str:
    return scripts.job_name(handle.launch_dir, handle.name)


def _slurm_job(handle: Handle) -> tuple[str, str]:
    if round_ := round_of(base_of(handle)):
        folder = Folder(path=round_.folder)
        return folder.job_name, folder.token
    return _name(handle), read_token(base_of(handle))


def _script_of(base: Path, round_: Round | None) -> Path:
    return (round_.folder / scripts.ALLOCATION if round_ else base).with_suffix(".sh")


def _submitted_unix_s(script: Path) -> float:
    """Return when a Slurm job's script was written; the token's file changes when the job is given up."""
    try:
        return script.stat().st_mtime
    except OSError:
        return time.time()


def _ended(base: Path) -> int | None:
    try:
        return int(files.read_json(ended_file(base))["code"])
    except (OSError, *DAMAGED):
        return None


def _expected_start(row: SlurmJob) -> float | None:
    """Return when the scheduler expects to start a job; None for a held job, which starts when somebody releases it."""
    try:
        return None if row.reason.startswith("JobHeld") else datetime.fromisoformat(row.start).timestamp()
    except ValueError:
        return None  # N/A
