"""How a job under a scheduler ended, and which hosts are to blame: from each node's records, then from the scheduler.

Also a job's token, which names the one submission that may run, and its file of orders. All of these files are in the
job's launch folder, so a driver on another machine finds them.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.launch.base import Handle, JobPlan, Status, Verdict
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.files import DAMAGED

#: Ends that are not the fault of a node, unless it failed before it was asked to stop.
_FROM_OUTSIDE: tuple[Verdict, ...] = ("cancelled", "preempted", "time_limit")
_SHARE = "runs_dir must be on storage that all nodes share"
#: Time for the program of every node to start, on busy machines too. srun ends those that have not started when another
#: one fails.
_STARTS_S = 30.0


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What the program of one node wrote.

    Args:
        host: the scheduler's name of the host.
        code: exit code of the job's command there; None until there is one.
        ended_unix_s: time of the end by that host's clock.
        oom_kills: processes that its kernel killed during the job because memory ran out.
        asked_to_stop: hlatctl or the scheduler asked it to stop; also known of a node that was killed afterwards.
        wall_s: time from the start to the end.
    """

    host: str
    code: int | None = None
    ended_unix_s: float = 0.0
    oom_kills: int = 0
    asked_to_stop: bool = False
    wall_s: float = 0.0


def node_records(base: Path, nodes: int = 0) -> list[NodeRecord]:
    """Return the records of a job's started nodes by rank, up to the first gap but of at least ``nodes`` nodes."""
    records, rank = [], 0
    while (record := _record(base, rank)) is not None or rank < nodes:
        records += [record] if record else []
        rank += 1
    return records


def has_ended(base: Path, rank: int) -> bool:
    """Return whether the program of one node has written its end, after which no process of the job runs there."""
    record = _record(base, rank)
    return record is not None and record.code is not None


def has_started(base: Path, rank: int) -> bool:
    """Return whether the program of one node has written its start."""
    return _record(base, rank) is not None


def conclude(
    verdict: Verdict,
    code: int | None,
    records: Sequence[NodeRecord],
    down: Sequence[str] = (),
    reason: str = "",
    hosts: tuple[str, ...] = (),
) -> Status:
    """Return how a job ended.

    A node that left no record of its start, although others did, can't see the run directory or can't run programs.

    Args:
        verdict: the scheduler's verdict; empty if it has none.
        code: exit code of the whole job; None if it left none.
        records: records of its nodes.
        down: its hosts that the scheduler reports as down.
        reason: the scheduler's reason.
        hosts: the job's hosts according to the scheduler; empty: those of the records.
    """
    # The script's own end is on the disk, so the records of starts are visible there too.
    absent = _absent(hosts, records) if code and not verdict and not down else ()
    if absent:
        down, reason = absent, f"no record of its start, see the job's log; {_SHARE}"
    if down and code != 0:
        verdict = "node_failed"
    blamed = tuple(down) or _first_to_fail(records)
    if not verdict and any(record.oom_kills for record in records if record.host in blamed):
        verdict = "out_of_memory"
    own = [record.code for record in records if record.host in blamed and record.code is not None]
    hosts = hosts or tuple(record.host for record in records)
    if not verdict:
        reason = "" if records or code is not None or not hosts else f"no node left a record; {_SHARE}"
    named = _failed_by_themselves(blamed, records) if verdict in _FROM_OUTSIDE else blamed
    common = {"reason": reason, "verdict": verdict, "hosts": hosts}
    if code == 0 and all(record.code == 0 for record in records):
        return Status(state="succeeded", exit_code=0, **common)  # type: ignore[arg-type]
    if own or code:
        return Status(state="failed", exit_code=own[0] if own else code, blamed_hosts=named, **common)  # type: ignore[arg-type]
    return Status(state="lost", blamed_hosts=named, **common)  # type: ignore[arg-type]


def _failed_by_themselves(hosts: Sequence[str], records: Sequence[NodeRecord]) -> tuple[str, ...]:
    failed = {record.host for record in records if record.code and not record.asked_to_stop}
    return tuple(host for host in hosts if host in failed)


def _absent(hosts: Sequence[str], records: Sequence[NodeRecord]) -> tuple[str, ...]:
    """Return the hosts that left no record, unless another one failed by itself before they can have started."""
    if any(record.code and not record.asked_to_stop and record.wall_s < _STARTS_S for record in records):
        return ()
    started = {record.host for record in records}
    return tuple(host for host in hosts if host not in started) if started else ()


def _first_to_fail(records: Sequence[NodeRecord]) -> tuple[str, ...]:
    """Return the nodes that started and left no end, or else the one with the first bad end.

    After a power cut the healthy nodes see closed connections and write their bad ends first. After the failure of one
    node, schedulers ask the others to stop, and kill those that still hang in a collective (Slurm: after KillWait).
    """
    if any(record.code and not record.asked_to_stop for record in records):
        records = [record for record in records if not record.asked_to_stop]
    silent = tuple(record.host for record in records if record.code is None)
    bad = [record for record in records if record.code]
    first = min(bad, key=lambda record: record.ended_unix_s, default=None)
    return silent or ((first.host,) if first else ())


def _record(base: Path, rank: int) -> NodeRecord | None:
    try:
        start = files.read_json(node.record(base, "pid", rank))
        host, started_unix_s = str(start["host"]), float(start["time_unix_s"])
    except (OSError, *DAMAGED):
        return None
    try:
        end = files.read_json(node.record(base, "exit_code", rank))
        ended_unix_s = float(end["time_unix_s"])
        return NodeRecord(
            host=host,
            code=int(end["code"]),
            ended_unix_s=ended_unix_s,
            oom_kills=int(end["oom_kills"] or 0),
            asked_to_stop=bool(end["asked_to_stop"]),
            wall_s=ended_unix_s - started_unix_s,
        )
    except (OSError, *DAMAGED):
        return NodeRecord(host=host, asked_to_stop=_was_asked(base, rank))


def _was_asked(base: Path, rank: int) -> bool:
    try:
        return bool(files.read_json(node.reserved(base, "exit_code", rank))["asked_to_stop"])
    except (OSError, *DAMAGED):
        return False


def base_of(handle: Handle) -> Path:
    """Return the common prefix of a job's files."""
    return Path(handle.launch_dir) / handle.name


def token_file(base: Path) -> Path:
    """Return the file that a job compares with its own token, so that an abandoned job does nothing."""
    return base.with_name(f"{base.name}.token")


def read_token(base: Path) -> str:
    """Return the token of the newest job of this place; empty if none was ever about to be submitted."""
    try:
        return token_file(base).read_text(encoding="utf-8").split()[-1]
    except (OSError, IndexError):
        return ""


def give_up(base: Path) -> None:
    """Change a job's token, so that its command does nothing if it starts late.

    The file is changed in place, because a full disk has no room for a new file; if that fails, it is removed.
    """
    path, token = token_file(base), read_token(base)
    try:
        with path.open("r+", encoding="utf-8") as file:
            file.write(f"given up {token}\n")
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()


def order(base: Path, what: str) -> str:
    """Write an order to the nodes of a job, ``stop``, ``end`` or ``stacks``; return why it can't be written."""
    path = node.orders(base)
    try:
        files.write_json(path, {"v": 1, "what": what, "id": uuid.uuid4().hex})
    except OSError as error:
        return f"{path}: can't be written ({error.strerror})"
    return ""


def order_stacks(base: Path) -> str:
    """Order the nodes' programs to have the ranks below them print their stacks; return the result in one sentence."""
    records = node_records(base)
    if not records:
        return "no stacks: no node has started the job"
    if problem := order(base, "stacks"):
        return f"no stacks: {problem}"
    return f"{len(records)} nodes asked to have their processes print their stacks into their logs"


def prepare(plan: JobPlan, token: str, *others: Path) -> None:
    """Remove the records of an earlier job of this place, and write the script, an empty log, and the token.

    Args:
        others: further files of an earlier job.
    """
    job, base = plan.job, plan.job.launch_dir / plan.job.name
    job.launch_dir.mkdir(parents=True, exist_ok=True)
    records = (path for kind in ("pid", "exit_code") for path in job.launch_dir.glob(f"{job.name}.node-*.{kind}"))
    first = (node.record(base, "pid"), node.record(base, "exit_code"))
    for stale in (*first, *records, node.orders(base), job.error_file, *others):
        stale.unlink(missing_ok=True)
    files.write_text(plan.script_path, plan.script)
    job.log_dir.mkdir(parents=True, exist_ok=True)
    job.log.touch()
    files.write_text(token_file(base), f"{token}\n")
