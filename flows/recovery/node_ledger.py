"""The node ledger: what is known of each host, from all runs of a runs folder; evidence that fades.

``<runs_dir>/nodes.jsonl``, append-only, a line an entry. ``record`` writes and ``read`` reads; all judgement is pure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hlatctl.run.errors import StorageError
from hlatctl.run.locks import locked_file
from hlatctl.run.reading import DAMAGED, parse_json, read_bytes

Kind = Literal["preflight_passed", "preflight_failed", "failure", "straggler"]

#: After this long an entry weighs half as much.
HALF_LIFE_S = 7 * 86400.0
#: What an entry weighs when it is new.
WEIGHTS: dict[str, float] = {"preflight_failed": 1.0, "failure": 1.0, "straggler": 0.5}
#: With so much against it since it last passed, a host is measured again before it is used; with so much in all it is
#: left out.
SUSPECT_SCORE, EXCLUDED_SCORE = 1.5, 2.5
#: The former where another host could take its place: a start on a broken node costs more than a measurement.
REPLACEABLE_SUSPECT_SCORE = 0.9
#: A host that has failed its preflight is given so long to be mended; then it is measured again.
REJECTED_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One piece of evidence.

    Args:
        detail: what was seen, in one line.
    """

    time_unix_s: float
    host: str
    kind: Kind
    run_id: str
    attempt: int
    detail: str = ""
    v: int = 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which hosts a job is kept from, and what there is to say about it."""

    left_out: tuple[str, ...] = ()
    message: str = ""


def record(path: Path, entries: Iterable[Entry]) -> None:
    """Append entries; several runs may do so at once.

    Raises:
        StorageError: the file can't be written.
    """
    text = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    try:
        with locked_file(path), path.open("ab") as file:
            if file.tell() and not _ends_with_newline(path):
                text = "\n" + text  # a writer died in the middle of a line; its line is lost, ours is not
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path}: can't be written ({error.strerror})") from None


def read(path: Path) -> list[Entry]:
    """All entries, oldest first; a torn or damaged line is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return []
    return list(_read(path, found.st_size, found.st_mtime_ns))


def scores(entries: Iterable[Entry], now_unix_s: float) -> dict[str, float]:
    """What speaks against each host, faded with time."""
    found: dict[str, float] = {}
    for entry in entries:
        age_s = max(0.0, now_unix_s - entry.time_unix_s)
        weight = WEIGHTS.get(entry.kind, 0.0) * 0.5 ** (age_s / HALF_LIFE_S)
        found[entry.host] = found.get(entry.host, 0.0) + weight
    return found


def suspects(entries: Iterable[Entry], now_unix_s: float, *, replaceable: bool = False) -> set[str]:
    """Hosts to be measured again before they are used: something speaks against them since they last passed.

    Args:
        replaceable: there are hosts to take their place, so that less is enough.
    """
    enough = REPLACEABLE_SUSPECT_SCORE if replaceable else SUSPECT_SCORE
    since_passed: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.kind == "preflight_passed":
            since_passed[entry.host] = []
        else:
            since_passed.setdefault(entry.host, []).append(entry)
    recent = [entry for listed in since_passed.values() for entry in listed]
    rejected = {entry.host for entry in recent if entry.kind == "preflight_failed"}
    return rejected | {host for host, score in scores(recent, now_unix_s).items() if score >= enough}


def rejected(entries: Iterable[Entry], now_unix_s: float) -> dict[str, float]:
    """Hosts that have failed their newest preflight, not long ago, with its time."""
    newest = {entry.host: entry for entry in entries if entry.kind in ("preflight_passed", "preflight_failed")}
    return {
        host: entry.time_unix_s
        for host, entry in newest.items()
        if entry.kind == "preflight_failed" and now_unix_s - entry.time_unix_s < REJECTED_S
    }


def excluded(entries: Iterable[Entry], now_unix_s: float) -> set[str]:
    """Repeat offenders, whatever preflight says of them: it does not find everything."""
    return {host for host, score in scores(entries, now_unix_s).items() if score >= EXCLUDED_SCORE}


def place(hosts: tuple[str, ...], needed: int, entries: Iterable[Entry], now_unix_s: float) -> Placement:
    """Leave hosts out, as far as enough remain.

    First those that preflight has rejected, the newest first, for the others may be mended; then repeat offenders, the
    worst first.
    """
    known = list(entries)
    score, unfit = scores(known, now_unix_s), rejected(known, now_unix_s)
    repeated = excluded(known, now_unix_s)
    offenders = sorted(
        (repeated | set(unfit)).intersection(hosts), key=lambda host: (-unfit.get(host, 0.0), -score[host], host)
    )
    spare = max(0, len(hosts) - needed)
    left_out, kept = tuple(offenders[:spare]), [host for host in offenders[spare:] if host in repeated]
    said = [f"left out for what the node ledger holds against it: {', '.join(left_out)}"] if left_out else []
    if kept:
        said.append(f"{', '.join(kept)} has failed repeatedly, but there is no other node to take its place")
    return Placement(left_out=left_out, message="; ".join(said))


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@lru_cache(maxsize=1)
def _read(path: Path, size_bytes: int, modified_ns: int) -> tuple[Entry, ...]:
    """As it is while size and time are these: it is asked for before every job."""
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror})", hint="move it away") from None
    return tuple(entry for line in lines if (entry := _parse(line)))


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
