"""The node ledger: failures and checks of every host in a runs folder, and where jobs are placed because of them.

The file is ``<runs_dir>/nodes.jsonl``, append-only, one entry per line; older entries count less. ``record`` writes it
and ``read`` reads it. ``Nodes`` applies it to the hosts of one run: which of them a job leaves out, which are measured
before they are used again, and which are to blame for the end of a job. The other functions are pure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from flows.launch.base import Job, Launcher, Status
from flows.recovery.failure_causes import NODE_CAUSES, Cause, Ending, failed_host
from hlatctl.run.errors import StorageError, cannot_write
from hlatctl.run.files import DAMAGED, locked_file, parse_json, read_bytes
from hlatctl.run.state import AttemptState

Kind = Literal["preflight_passed", "preflight_failed", "failure", "straggler", "corruption", "device", "leaving"]

#: A host with such an entry, and no passed preflight after it, is not used for a while.
_REJECTING: tuple[Kind, ...] = ("preflight_failed", "corruption", "device", "leaving")

#: After this time an entry weighs half as much.
HALF_LIFE_S = 7 * 86400.0
#: Weight of a new entry.
WEIGHTS: dict[str, float] = {
    "preflight_failed": 1.0,
    "failure": 1.0,
    "straggler": 0.5,
    "corruption": 1.0,
    "device": 1.0,
}
#: From this sum of weights since it last passed preflight, a host is a suspect and is measured before it is used; from
#: this sum of all weights it is excluded.
SUSPECT_SCORE, EXCLUDED_SCORE = 1.5, 2.5
#: The same limits if another host can replace it: a start on a broken node costs more than a measurement.
REPLACEABLE_SUSPECT_SCORE = 0.9
#: What an attempt's end is in the ledger for the hosts to blame, if it is no mere failure.
KIND_OF_CAUSE: dict[Cause, Kind] = {"corruption": "corruption", "device_failed": "device"}
#: A host is not used for this long after a failed preflight, wrong numbers, a fault of a device, or the notice that it
#: is taken back. Then it is measured again.
REJECTED_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One failure or check of a host; ``detail`` describes it in one line."""

    time_unix_s: float
    host: str
    kind: Kind
    run_id: str
    attempt: int
    detail: str = ""
    v: int = 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Hosts that a job doesn't use, and a sentence about them, or empty."""

    left_out: tuple[str, ...] = ()
    message: str = ""


def record(path: Path, entries: Iterable[Entry]) -> None:
    """Append entries; safe while other runs append too. Raises a StorageError if the file can't be written."""
    text = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    try:
        with locked_file(path), path.open("ab") as file:
            if file.tell() and not _ends_with_newline(path):
                text = "\n" + text  # a writer died in the middle of a line; that line is lost, this one is not
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def read(path: Path) -> list[Entry]:
    """Return all entries, oldest first, without damaged lines."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return []
    return list(_read(path, info.st_size, info.st_mtime_ns))


def rejected_since(entries: Iterable[Entry], since_unix_s: float) -> set[str]:
    """Return the hosts that have failed a preflight since a time."""
    return {entry.host for entry in entries if entry.kind == "preflight_failed" and entry.time_unix_s >= since_unix_s}


def newly_passed(entries: Iterable[Entry], hosts: Iterable[str]) -> list[str]:
    """Return the hosts whose newest entry is not already a passed preflight."""
    newest = {entry.host: entry.kind for entry in entries}
    return [host for host in hosts if newest.get(host) != "preflight_passed"]


def scores(entries: Iterable[Entry], now_unix_s: float) -> dict[str, float]:
    """Return the sum of each host's weights, reduced by age. A fault counts once, however often preflight finds it."""
    by_host: dict[str, float] = {}
    newest: dict[str, Kind] = {}
    for entry in entries:
        before, newest[entry.host] = newest.get(entry.host), entry.kind
        if entry.kind not in WEIGHTS or before == entry.kind == "preflight_failed":
            continue
        age_s = max(0.0, now_unix_s - entry.time_unix_s)
        weight = WEIGHTS[entry.kind] * 0.5 ** (age_s / HALF_LIFE_S)
        by_host[entry.host] = by_host.get(entry.host, 0.0) + weight
    return by_host


def suspects(entries: Iterable[Entry], now_unix_s: float, *, replaceable: bool = False) -> set[str]:
    """Return the hosts to measure before they are used again; ``replaceable`` hosts have a lower limit."""
    enough = REPLACEABLE_SUSPECT_SCORE if replaceable else SUSPECT_SCORE
    since_passed: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.kind == "preflight_passed":
            since_passed[entry.host] = []
        else:
            since_passed.setdefault(entry.host, []).append(entry)
    recent = [entry for listed in since_passed.values() for entry in listed]
    rejected = {entry.host for entry in recent if entry.kind in _REJECTING}
    return rejected | {host for host, score in scores(recent, now_unix_s).items() if score >= enough}


def rejected(entries: Iterable[Entry], now_unix_s: float) -> dict[str, float]:
    """Return the hosts rejected in the last ``REJECTED_S`` seconds that passed no preflight since, with the time."""
    newest = {entry.host: entry for entry in entries if entry.kind in ("preflight_passed", *_REJECTING)}
    return {
        host: entry.time_unix_s
        for host, entry in newest.items()
        if entry.kind in _REJECTING and now_unix_s - entry.time_unix_s < REJECTED_S
    }


def place(hosts: tuple[str, ...], needed: int, entries: Iterable[Entry], now_unix_s: float) -> Placement:
    """Choose the hosts to leave out, as long as ``needed`` hosts remain.

    Hosts that preflight rejected come first, the newest first, because the others may be repaired by now. Then come
    hosts that failed repeatedly, the worst first, even if they passed preflight: it doesn't find every fault.
    """
    known = list(entries)
    score, unfit = scores(known, now_unix_s), rejected(known, now_unix_s)
    repeated = {host for host, sum_of_weights in score.items() if sum_of_weights >= EXCLUDED_SCORE}
    known_bad = (repeated | set(unfit)).intersection(hosts)
    offenders = sorted(known_bad, key=lambda host: (-unfit.get(host, 0.0), -score.get(host, 0.0), host))
    spare = max(0, len(hosts) - needed)
    left_out, kept = tuple(offenders[:spare]), [host for host in offenders[spare:] if host in repeated]
    sentences = [f"left out because of the node ledger: {', '.join(left_out)}"] if left_out else []
    if kept:
        sentences.append(f"{', '.join(kept)} has failed repeatedly, but no other node can replace it")
    return Placement(left_out=left_out, message="; ".join(sentences))


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


#: The bytes of whole lines that were read last, and their entries. The file grows, so only its end is parsed again.
_parsed: tuple[bytes, tuple[Entry, ...]] = (b"", ())


@lru_cache(maxsize=1)
def _read(path: Path, size_bytes: int, modified_ns: int) -> tuple[Entry, ...]:
    """Return the entries of a file of this size and time; cached, because every job asks for them."""
    global _parsed
    try:
        data = read_bytes(path)
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror})", hint="move it away") from None
    before, entries = _parsed if data.startswith(_parsed[0]) else (b"", ())
    whole = data[: data.rfind(b"\n") + 1]
    _parsed = whole, (*entries, *_entries(whole[len(before) :]))
    return (*_parsed[1], *_entries(data[len(whole) :]))


def _entries(lines: bytes) -> list[Entry]:
    return [entry for line in lines.decode(errors="replace").splitlines() if (entry := _parse(line))]


def _parse(line: str) -> Entry | None:
    try:
        value: dict[str, Any] = parse_json(line)
        return Entry(
            time_unix_s=float(value["time_unix_s"]),
            host=str(value["host"]),
            kind=value["kind"],
            run_id=str(value["run_id"]),
            attempt=int(value["attempt"]),
            detail=str(value.get("detail", "")),
        )
    except DAMAGED:
        return None


#: Causes that a log names: if several nodes name the same one, it is not the fault of one of them.
_NAMED_BY_LOG: frozenset[Cause] = frozenset({"device_failed", "network", "shared_memory", "collective_timeout"})


def blamed_hosts(
    cause: Cause,
    status: Status,
    used: Sequence[str],
    first_failed: str,
    *,
    naming: Sequence[str] = (),
    hung: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the hosts to blame; none if the cause is not the fault of a node, or if nothing identifies the node.

    Args:
        status: status of the ended job; its hosts and blamed hosts count if the launcher reports them.
        used: the hosts of the attempt if the launcher doesn't report them.
        first_failed: the host that torchrun names, or empty.
        naming: hosts whose logs name the cause.
        hung: hosts of the ranks for which the others of a hanging job waited.
    """
    hosts = status.hosts or tuple(used)
    if cause not in NODE_CAUSES:
        return ()
    if cause == "node_failed":
        return status.blamed_hosts
    if len(hosts) == 1:
        return hosts
    if cause in _NAMED_BY_LOG and len(naming) > 1:
        return ()
    if cause == "collective_timeout":  # those that time out have waited for another one
        return tuple(host for host in hosts if host not in naming) if len(hosts) - len(naming) == 1 else ()
    # A hanging job is ended from outside, so the order in which its nodes end means nothing.
    if cause == "hang" and len(set(hung)) == 1:
        return tuple(set(hung))
    if status.hosts and cause != "hang":
        return status.blamed_hosts if len(status.blamed_hosts) < len(hosts) else ()
    return tuple(host for host in hosts if host == first_failed)[:1]


@dataclass(frozen=True)
class Nodes:
    """The hosts that one run can use, as the node ledger describes them now."""

    ledger: Path
    launcher: Launcher
    needed: int
    now_unix_s: Callable[[], float]

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, including spare ones."""
        return self.launcher.hosts(self.needed)

    def used(self, left_out: Sequence[str], avoided: Sequence[str] = ()) -> list[str]:
        """Return the hosts of a job that leaves out some and avoids others, for launchers that don't report them."""
        return sorted((host for host in self.hosts if host not in left_out), key=avoided.__contains__)[: self.needed]

    def place(self) -> Placement:
        """Return the hosts that a job leaves out."""
        return place(self.hosts, self.needed, read(self.ledger), self.now_unix_s())

    def suspects(self) -> set[str]:
        """Return the hosts to measure before they are used again; spare hosts make the limit lower."""
        hosts = self.hosts
        found = suspects(read(self.ledger), self.now_unix_s(), replaceable=len(hosts) > self.needed)
        return found.intersection(hosts).difference(self.place().left_out)

    def rejected(self) -> set[str]:
        """Return the hosts that preflight rejected."""
        return set(rejected(read(self.ledger), self.now_unix_s())).intersection(self.hosts)

    def rejected_since(self, ended: AttemptState) -> list[str]:
        """Return the hosts of an ended attempt that preflight has rejected since: its end may be their fault."""
        used = ended.hosts or self.used(ended.left_out_hosts)
        return sorted(rejected_since(read(self.ledger), ended.ended_unix_s or 0.0).intersection(used))

    def why_measure(self, job: Job, ended: AttemptState) -> str:
        """Return why nodes are measured before a job that follows an attempt; empty: they are not.

        They are if one of them is a suspect that no spare node of the job's allocation can replace, or if an unknown
        one of several may have failed.
        """
        left_out, doubtful = self.place().left_out, self.suspects()
        kept = self.launcher.allocation(replace(job, excluded_hosts=left_out))
        if kept and kept.hosts:
            doubtful &= set(kept.hosts)
            if len(set(kept.hosts).difference(doubtful, left_out)) >= job.nodes:
                doubtful = set()
        if doubtful:
            return f"{', '.join(sorted(doubtful))} failed before"
        unknown = job.nodes > 1 and ended.cause in NODE_CAUSES and not ended.blamed_hosts
        return "one of them may have failed" if unknown else ""

    def blame(
        self,
        ending: Ending,
        status: Status,
        job: Job,
        log_tail: str,
        *,
        naming: Sequence[str] = (),
        hung: Sequence[str] = (),
    ) -> Ending:
        """Return how a job ended, with the hosts to blame for it (:func:`blamed_hosts`)."""
        used, first = self.used(job.excluded_hosts, job.avoided_hosts), failed_host(log_tail)
        return replace(ending, hosts=blamed_hosts(ending.cause, status, used, first, naming=naming, hung=hung))
