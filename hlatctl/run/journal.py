"""The journal: append-only JSON Lines, one file per writer, and a reader that merges them.

An event is ``{"v", "seq", "time_unix_s", "attempt", "kind", ...}``; ``docs/architecture.md`` lists the kinds and their
fields. A writer that dies can leave an incomplete last line: readers drop it, and the next writer of the file removes
it. Each line ends with its CRC-32 (``crc``), which readers check and drop. Readers replace damaged lines by a
``warning`` event that is in no file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlatctl.run.errors import FULL, RunBusyError, StorageError, cannot_write
from hlatctl.run.events import is_event
from hlatctl.run.locks import try_lock
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import parse_json

Event = dict[str, Any]

FLOW_WRITER = "flow"
EVALUATE_WRITER = "evaluate"
OPERATOR_WRITER = "operator"
MIRROR_WRITER = "mirror"
DRILL_WRITER = "drill"
#: Prefix of the names of the training processes' writers.
TRAIN_WRITER = "train-"
_VERSION = 1
#: End of each line. It detects values that changed on the disk.
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_MAX_UNWRITTEN_BYTES = 64 << 20


def train_writer(rank: int) -> str:
    """Return the name of a training process's writer."""
    return f"{TRAIN_WRITER}rank{rank:05d}"


def eval_writer(milestone_tokens: int) -> str:
    """Return the name of the writer of a milestone's evaluation."""
    return f"eval-{milestone_tokens}"


class JournalWriter:
    """Appends events to ``journal/<writer>.jsonl`` and locks the file until closed. Threads can share it.

    Events that don't fit on a full disk are kept in memory. The next event, :meth:`flush` or :meth:`close` writes them
    when there is space. Until then each event still sets the file's time, which needs no space (:func:`heartbeat`).

    Args:
        run: the run directory.
        writer: file stem.
        attempt: the attempt of the events; 0 before the first.
        now_unix_s: the clock; a simulation has its own.

    Raises:
        RunBusyError: another live process has the file open for writing.
        StorageError: the folder can't be written.
    """

    def __init__(
        self, run: RunPaths, writer: str, attempt: int = 0, *, now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self.path = run.journal / f"{writer}.jsonl"
        self.attempt = attempt
        self._now_unix_s = now_unix_s
        try:
            run.journal.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            is_free = try_lock(self._file)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise StorageError(f"{self.path}: can't be written (is not a regular file)", hint="move it away")
        if not is_free:
            self._file.close()
            raise RunBusyError(
                f"{self.path}: another process is writing this journal",
                hint="wait until it ends, or stop it, then retry",
            )
        self._cut_torn_line()
        self._seq = _last_seq(self.path) + 1
        self._appending = threading.Lock()
        self._full = False
        self.unwritten = b""
        """Bytes that did not fit on the disk."""

    def append(self, kind: str, *, durable: bool = False, **fields: Any) -> Event:
        """Append one event and return it.

        Args:
            kind: one of the kinds in ``docs/architecture.md``.
            durable: fsync before returning, so that the event survives a power cut.
            fields: JSON values. NaN and infinities are written as strings, because JSON doesn't have them.

        Raises:
            StorageError: it can't be written for another reason than a full disk, or too many bytes are kept already.
        """
        with self._appending:
            event: Event = {
                "v": _VERSION,
                "seq": self._seq,
                "time_unix_s": self._now_unix_s(),
                "attempt": self.attempt,
                "kind": kind,
                **{key: _json_safe(value) for key, value in fields.items()},
            }
            self._write(_with_crc(json.dumps(event, separators=(",", ":"), allow_nan=False).encode()) + b"\n")
            self._seq += 1
        if durable:  # without the lock: a slow disk must not delay other threads
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._not_written(error) from None
        return event

    def flush(self) -> None:
        """Write the events that did not fit on the disk, if there is space now.

        Raises:
            StorageError: they can't be written for another reason.
        """
        with self._appending:
            self._write(b"")

    def events(self) -> list[Event]:
        """Return the events of this file, which is much smaller than a run's journal."""
        return list(_parse_lines(self.path.read_bytes(), self.path.stem, 0.0))

    def close(self) -> None:
        """Write the remaining events if there is space, and release the file."""
        with suppress(StorageError):  # append has already raised it
            self.flush()
        self._file.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.close()
        if self._full and failure is None:  # the caller relies on these events
            raise self._not_written(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _write(self, line: bytes) -> None:
        self.unwritten += line
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self._file.write(self.unwritten) :]
            self._full = False
        except OSError as error:
            self._full = error.errno in FULL
            if not self._full or len(self.unwritten) > _MAX_UNWRITTEN_BYTES:
                raise self._not_written(error) from None
            if line:
                with suppress(OSError):
                    os.utime(self._file.fileno())

    def _not_written(self, error: OSError) -> StorageError:
        return cannot_write(self.path, error, hint="free space, or repair the storage")

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        if content and not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)


def heartbeat(run: RunPaths, writer: str) -> int:
    """Return a number that changes with each event of a writer, even if the event doesn't fit on the disk.

    It is the time of the writer's file. Compare it only with earlier values: the clocks of hosts differ.
    """
    try:
        return (run.journal / f"{writer}.jsonl").stat().st_mtime_ns
    except OSError:
        return 0


class JournalTail:
    """Reads the new events of a run's journal, across all writers.

    ``offsets`` (bytes read by file stem) can be saved, to continue later.
    """

    def __init__(self, run: RunPaths, offsets: dict[str, int] | None = None) -> None:
        self._journal = run.journal
        self._own: dict[str, list[Event]] = {}
        self.offsets: dict[str, int] = dict(offsets or {})
        self._reported: set[str] = set()

    def add(self, event: Event, writer: str) -> None:
        """Add an event that this process wrote. From then on, the file of its writer is not read.

        So a process knows its own events even if they don't fit on the disk.
        """
        line = json.dumps(event, allow_nan=False)
        self._own.setdefault(writer, []).append({**json.loads(line), "writer": writer})

    def read_new(self) -> list[Event]:
        """Return the events since the last call, in order of time.

        Raises:
            StorageError: a file of the journal can't be read.
        """
        events: list[tuple[tuple[float, str, int], Event]] = []
        for writer, own in self._own.items():
            events.extend(_in_order(own))
            self._own[writer] = []
        for path in sorted(self._journal.glob("*.jsonl")):
            if path.stem in self._own:
                continue
            try:
                events.extend(_in_order(self._new_of(path)))
            except OSError as error:
                raise StorageError(
                    f"{path}: can't be read ({error.strerror})", hint="`ls -l` shows whose it is"
                ) from None
        return [event for _, event in sorted(events, key=lambda pair: pair[0])]

    def _new_of(self, path: Path) -> list[Event]:
        """Return the new events of one file. If it is not a regular file, return one warning."""
        mode, size_bytes = _kind_and_size(path)
        if not stat.S_ISREG(mode):
            news = [] if path.name in self._reported else [_no_file(path)]
            self._reported.add(path.name)
            return news
        offset = self.offsets.get(path.stem, 0)
        if size_bytes <= offset:
            return []
        with path.open("rb") as file:
            file.seek(offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self.offsets[path.stem] = offset + len(complete)
        return list(_parse_lines(complete, path.stem, os.stat(path).st_mtime))


def read_events(run: RunPaths) -> list[Event]:
    """Return all events of a run in order of time, each with its ``writer`` (file stem)."""
    return JournalTail(run).read_new()


def number(event: Event, name: str) -> float:
    """Return a number of an event. NaN if it is missing or not a number."""
    try:
        return float(event.get(name, "nan"))
    except (TypeError, ValueError):
        return float("nan")


def _in_order(events: Iterable[Event]) -> Iterator[tuple[tuple[float, str, int], Event]]:
    """Yield one writer's events with their sort key. A clock that is set back does not reorder them."""
    time_unix_s = float("-inf")
    for event in events:
        time_unix_s = max(time_unix_s, event["time_unix_s"])
        yield (time_unix_s, event["writer"], event["seq"]), event


def _with_crc(line: bytes) -> bytes:
    return line[:-1] + b',"crc":"%08x"}' % zlib.crc32(line)


def _without_crc(line: bytes) -> bytes:
    """Return the line as it was before ``_with_crc``. Empty if it is damaged."""
    match = _CRC.search(line)
    if not match:
        return line
    before = line[: match.start()] + b"}"
    return before if int(match[1], 16) == zlib.crc32(before) else b""


def _parse_lines(block: bytes, writer: str, changed_unix_s: float) -> Iterator[Event]:
    """Yield the events of complete lines, and one warning for each series of damaged lines.

    Args:
        block: the lines.
        writer: of the file.
        changed_unix_s: the time of a warning before the first event.
    """
    damaged, last = 0, {"seq": 0, "time_unix_s": changed_unix_s}
    for line in block.splitlines():
        event = _parse(line)
        if event is None:
            damaged += bool(line)
            continue
        if damaged:
            yield _ignored(damaged, writer, last, last if last["seq"] else event)
        damaged, last = 0, event
        event["writer"] = writer
        yield event
    if damaged:
        yield _ignored(damaged, writer, last, last)


def _parse(line: bytes) -> Event | None:
    """Return the event of a line. None if it is damaged."""
    try:
        event = parse_json(_without_crc(line))
    except ValueError:
        return None
    return event if is_event(event) else None


def _ignored(lines: int, writer: str, before: Event, beside: Event) -> Event:
    where = f"after event {before['seq']}" if before["seq"] else "at its beginning"
    count = "1 damaged line is ignored" if lines == 1 else f"{lines} damaged lines are ignored"
    return _warning(f"journal/{writer}.jsonl: {count}, {where}", writer, beside)


def _no_file(path: Path) -> Event:
    now = {"seq": 0, "time_unix_s": path.lstat().st_mtime}
    return _warning(f"journal/{path.name}: is not a regular file, ignored", path.stem, now)


def _warning(message: str, writer: str, beside: Event) -> Event:
    return {
        "v": _VERSION,
        "seq": beside["seq"],
        "time_unix_s": beside["time_unix_s"],
        "attempt": 0,
        "kind": "warning",
        "message": message,
        "writer": writer,
    }


def _kind_and_size(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        status = path.lstat()  # a broken symbolic link
    return status.st_mode, status.st_size


def _last_seq(path: Path) -> int:
    last = 0
    for event in _parse_lines(path.read_bytes(), path.stem, 0.0):
        last = max(last, event["seq"])
    return last


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
