"""A run's folded state, kept beside its journal, so that reading a run doesn't take longer as it grows.

``journal/.fold/state`` holds the state after the first events of the journal, and how far each writer's file was read.
``journal/.fold/rows-*`` hold its steps. They are derived from the journal and never the truth: a reader folds the
journal from the beginning if they are missing, damaged, of another version of this code, or don't fit the journal.
``docs/decisions/0029-a-kept-fold.md`` explains why the result is the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hlatctl.run import lines
from hlatctl.run.journal import Event, JournalTail, Place
from hlatctl.run.paths import RunPaths
from hlatctl.run.plain import from_plain
from hlatctl.run.reading import DAMAGED, read_bytes
from hlatctl.run.state import RunState
from hlatctl.run.steps import Home, Rows, Segment, StepSeries, segment_name, write_derived

Apply = Callable[[RunState, Event], None]

#: New bytes of journal after which the state is kept again: about 7,000 steps, which fold in 0.1 s.
KEEP_BYTES = 2 << 20
#: The newest events are left out: a host whose clock is slow may still write earlier ones.
_SETTLED_S = 600.0
#: Bytes at the beginning, and before the place, of each file that must be as they were.
_WITNESS_BYTES = 1024
#: A state is smaller: it has up to 65,536 rows of 128 bytes, and what the journal says of attempts and checkpoints.
_MAX_BYTES = 256 << 20
#: The state is discarded if one of these modules has changed.
_CODE = (
    "events",
    "fold",
    "fold_evaluation",
    "fold_queue",
    "journal",
    "kept_fold",
    "labels",
    "lines",
    "state",
    "step_metrics",
    "steps",
    "stopping",
)


def follow(run: RunPaths, apply: Apply) -> tuple[RunState, JournalTail]:
    """Return a run's state, and its journal to continue from there.

    Raises:
        StorageError: a file of the journal can't be read.
    """
    try:
        return _continue(run, apply, *_kept(run, apply))
    except (_UnfitError, OSError, *DAMAGED):
        return _continue(run, apply, *_nothing(run, apply))


class _UnfitError(Exception):
    """The kept state doesn't fit the journal."""


def _nothing(run: RunPaths, apply: Apply) -> tuple[RunState, JournalTail]:
    return RunState(steps=StepSeries(_home(run, apply))), JournalTail(run)


def _home(run: RunPaths, apply: Apply) -> Home:
    def rebuild() -> Rows:
        state = RunState()
        for event in JournalTail(run).stream():
            apply(state, event)
        return state.steps.rows

    return Home(run.fold, rebuild)


def _continue(run: RunPaths, apply: Apply, state: RunState, tail: JournalTail) -> tuple[RunState, JournalTail]:
    """Apply the rest of the journal, and keep the state on the way if there is much.

    Raises:
        _UnfitError: an event belongs before the kept ones.
    """
    began_unix_s, begun_bytes = tail.clock_unix_s, tail.bytes_read
    settled_unix_s = _newest_unix_s(run) - _SETTLED_S
    sizes = (path.stat().st_size for path in run.journal.glob("*.jsonl") if path.is_file())
    may_keep = sum(sizes) - begun_bytes >= KEEP_BYTES
    for event in tail.stream():
        if tail.clock_unix_s < began_unix_s:
            raise _UnfitError
        if may_keep and tail.clock_unix_s > settled_unix_s:
            may_keep = False
            if tail.bytes_read - begun_bytes >= KEEP_BYTES and not tail.ends_damaged:
                _keep(run, state, tail)
        apply(state, event)
    return state, tail


def _newest_unix_s(run: RunPaths) -> float:
    events = (lines.last_event(path) for path in run.journal.glob("*.jsonl") if path.is_file())
    return max((lines.clock_unix_s(event) for event in events if event), default=-math.inf)


def _keep(run: RunPaths, state: RunState, tail: JournalTail) -> None:
    """Write the state. A folder that can't be written, or a full disk, is no error."""
    rows = state.steps.rows
    with suppress(OSError):
        head = {
            "code": code(),
            "byteorder": sys.byteorder,
            "clock_unix_s": max(place[1] for place in tail.places.values()),
            "places": tail.places,
            "witnesses": {stem: _witness(run, stem, place[0]) for stem, place in tail.places.items()},
            "state": {
                field.name: _plain(getattr(state, field.name))
                for field in dataclasses.fields(state)
                if field.name != "steps"
            },
            "ranges": state.steps.ranges,
            "others": rows.others,
            "segments": [[segment.crc, segment.columns] for segment in rows.segments],
            "rows": len(rows.tail[0]),
        }
        body = [json.dumps(head).encode() + b"\n", *(column.tobytes() for column in rows.tail)]
        write_derived(run.fold / "state", [b"%08x\n" % _crc(body), *body])
        known = {segment.path.name for segment in rows.segments}
        for path in run.fold.glob("rows-*"):  # of an earlier course of the journal
            if path.name not in known and int(path.name[5:10]) < len(known):
                path.unlink()


def _kept(run: RunPaths, apply: Apply) -> tuple[RunState, JournalTail]:
    """Return the kept state.

    Raises:
        _UnfitError: it is damaged, of other code, or doesn't fit the journal.
        OSError: there is none, or it can't be read.
    """
    content = read_bytes(run.fold / "state", most=_MAX_BYTES)
    end = content.index(b"\n", 9)
    head = json.loads(content[9:end])
    if int(content[:8], 16) != zlib.crc32(memoryview(content)[9:]) or head["code"] != code():
        raise _UnfitError
    if head["byteorder"] != sys.byteorder:
        raise _UnfitError
    places: dict[str, Place] = {stem: tuple(place) for stem, place in head["places"].items()}
    for stem, place in places.items():
        if _witness(run, stem, place[0]) != head["witnesses"][stem]:
            raise _UnfitError
    state = from_plain(RunState, {**head["state"], "steps": StepSeries(_home(run, apply))})
    state.steps.ranges = head["ranges"]
    _restore(state.steps.rows, run.fold, head, memoryview(content)[end + 1 :])
    tail = JournalTail(run)
    tail.places, tail.clock_unix_s = places, head["clock_unix_s"]
    return state, tail


def _restore(rows: Rows, folder: Path, head: dict[str, Any], columns: memoryview) -> None:
    rows.segments = [
        Segment(folder / segment_name(number, crc), crc, count) for number, (crc, count) in enumerate(head["segments"])
    ]
    rows.others = head["others"]
    rows.tail += [array("d") for _ in rows.others]
    length = 8 * head["rows"]
    for number, column in enumerate(rows.tail):
        column.frombytes(columns[number * length : (number + 1) * length])


def _witness(run: RunPaths, stem: str, offset: int) -> int:
    """Return a checksum of the beginning of a file and of the bytes before an offset; -1 if it is shorter.

    Raises:
        OSError: it can't be read.
    """
    path = run.journal / f"{stem}.jsonl"
    if not path.is_file():  # opening a named pipe would wait for ever
        return -1
    with path.open("rb") as file:
        begin = file.read(min(_WITNESS_BYTES, offset))
        file.seek(max(0, offset - _WITNESS_BYTES))
        before = file.read(min(_WITNESS_BYTES, offset))
    complete = len(before) == min(_WITNESS_BYTES, offset)
    return zlib.crc32(before, zlib.crc32(begin)) if complete else -1


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _crc(parts: list[bytes]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


@cache
def code() -> int:
    """Return a checksum of the modules that fold, in the place of a version number."""
    return source_crc(Path(__file__).parent, _CODE)


def source_crc(folder: Path, modules: Iterable[str], crc: int = 0) -> int:
    """Return a checksum of the source of modules.

    Args:
        folder: of the modules.
        modules: their names.
        crc: a checksum to include.
    """
    for name in modules:
        crc = zlib.crc32((folder / f"{name}.py").read_bytes(), crc)
    return crc
