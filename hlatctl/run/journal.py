"""The journal: append-only JSON Lines, one file per writer, and a reader that merges them.

An event is ``{"v", "seq", "time_unix_s", "attempt", "kind", ...}``; ``docs/architecture.md`` lists the kinds and their
fields. A writer that dies can leave an incomplete last line: readers drop it, and the next writer of the file removes
it. Each line ends with its CRC-32 (``crc``), which readers check and drop. Readers replace damaged lines with a
``warning`` event that is in no file.
"""

from __future__ import annotations

import errno
import heapq
import io
import json
import math
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from json.scanner import make_scanner
from pathlib import Path
from typing import IO, Any

from hlatctl.run import files
from hlatctl.run.errors import FULL, RunBusyError, StorageError, cannot_write
from hlatctl.run.events import AFTER, is_event
from hlatctl.run.events import Event as Event
from hlatctl.run.files import parse_json, try_lock
from hlatctl.run.paths import RunPaths

LINE_VERSION = 1
#: A line ends with ``,"crc":"01234567"}``. The checksum detects values that changed on the disk.
_CRC = b',"crc":"'
_CRC_BYTES = len(b',"crc":"01234567"\n')
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
#: The largest whole number that ``parse_json`` accepts too.
_MAX_INT = 2**64
_INFINITY = float("inf")
#: Limit of a line; a longer one counts as damaged. The largest that a run writes lists a few thousand nodes or scores.
MAX_BYTES = 4 << 20
#: Bytes that are read at a time, from the end of a file, to find its last event.
_END_BYTES = 1 << 16


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
#: Without functions for numbers, the decoder is three times faster than that of ``parse_json``.
_SCAN: Callable[[str, int], tuple[Any, int]] = make_scanner(_DECODER)  # type: ignore[arg-type]


def to_line(event: Event) -> bytes:
    """Return an event's line, with its checksum and the end of line."""
    line = _ENCODER.encode(event).encode()
    if len(line) > MAX_BYTES - _CRC_BYTES:
        raise ValueError(f"the {event['kind']} event has {len(line):,} bytes, readers ignore more than {MAX_BYTES:,}")
    return b'%b,"crc":"%08x"}\n' % (line[:-1], zlib.crc32(line))


def parse_line(line: bytes) -> Event | None:
    """Return the event of a line, without its checksum. None if it is damaged."""
    before = line[:-18] + b"}"
    if line[-18:] != b'%b%08x"}' % (_CRC, zlib.crc32(before)):
        return None
    try:
        event = _decode(before)
    except (ValueError, RecursionError):
        return None
    return event if is_event(event) else None


def _decode(line: bytes) -> Any:
    """Parse JSON with the limits of ``parse_json``: the same numbers, and the same depth."""
    text = line.decode()
    try:
        event, end = _SCAN(text, 0)
    except StopIteration:
        return parse_json(text)
    if end != len(text) or type(event) is not dict:
        return parse_json(text)
    for item in event.values():
        kind = type(item)
        if kind is float:
            if not -_INFINITY < item < _INFINITY:
                return parse_json(text)
        elif (kind is int and not -_MAX_INT <= item <= _MAX_INT) or kind is dict or kind is list:
            return parse_json(text)
    return event


def order_unix_s(event: Event) -> float:
    """Return the time that orders an event: its time, or a later one if a clock was set back."""
    time_unix_s: float = event["time_unix_s"]
    return max(time_unix_s, event[AFTER]) if AFTER in event else time_unix_s


def last_event(path: Path) -> Event | None:
    """Return the last event of a file that is not damaged. The cost doesn't grow with the file."""
    with path.open("rb") as file:
        start = file.seek(0, 2)
        begun = b""  # the beginning of the line that the next block ends in; of a long one, more bytes than allowed
        while start:
            end, start = start, max(0, start - _END_BYTES)
            file.seek(start)
            *found, last = file.read(end - start).split(b"\n")
            found.append((last + begun)[: MAX_BYTES + 1])
            for line in reversed(found[1 if start else 0 :]):
                if line and len(line) <= MAX_BYTES and (event := parse_line(line)):
                    return event
            begun = found[0]
        return None


def ignored(count: int, line: int, writer: str, beside: Event) -> Event:
    """Return the warning that replaces damaged lines. Its field ``damaged`` tells it from other warnings.

    Args:
        count: number of damaged lines.
        line: number of the first of them in its file, from 1.
        writer: writer of the file.
        beside: event whose time and number the warning gets.
    """
    lines = f"line {line} is" if count == 1 else f"{count} lines from line {line} on are"
    return {**warning(f"journal/{writer}.jsonl: {lines} damaged and ignored", writer, beside), "damaged": True}


def warning(message: str, writer: str, beside: Event) -> Event:
    """Return a ``warning`` event that is in no file, with the time and the number of another event."""
    return {
        "v": LINE_VERSION,
        "seq": beside["seq"],
        "time_unix_s": beside["time_unix_s"],
        "attempt": 0,
        "kind": "warning",
        "message": message,
        "writer": writer,
    }


FLOW_WRITER = "flow"
EVALUATE_WRITER = "evaluate"
OPERATOR_WRITER = "operator"
MIRROR_WRITER = "mirror"
NOTIFY_WRITER = "notify"
DRILL_WRITER = "drill"
#: Prefix of the names of the training processes' writers.
TRAIN_WRITER = "train-"
#: Step from an event's time to the next one's after a clock was set back; more than a float's resolution.
_NEXT_S = 1e-6
_MAX_UNWRITTEN_BYTES = 64 << 20
#: Files with fewer new bytes are read whole and closed, so that a run with hundreds of writers needs few open files.
_SMALL_BYTES = 1 << 20

#: Index of a warning of damaged lines at the end of a file; larger than any other.
_AT_END = 1 << 62
#: How far a writer's file has been read: offset in bytes; newest time, number and time of the last event.
Place = tuple[int, float, int, float]
#: Ordering time, writer, index within the file, event, and offset after it.
_Item = tuple[float, str, int, Event, Place]


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
        writer: stem of the file.
        attempt: attempt of the events; 0 before the first.
        now_unix_s: clock; a simulation has its own.
        check: called before each write; raises if this process must not write any more.

    Raises:
        RunBusyError: another live process has the file open for writing.
        StorageError: the folder can't be written.
    """

    def __init__(
        self,
        run: RunPaths,
        writer: str,
        attempt: int = 0,
        *,
        now_unix_s: Callable[[], float] = time.time,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = run.journal / f"{writer}.jsonl"
        self.attempt = attempt
        self._now_unix_s, self._check = now_unix_s, check
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
        last = last_event(self.path)
        self._seq = last["seq"] + 1 if last else 1
        #: Order events after this time, even if this host's clock was set back. The driver has seen all events before
        #: it starts what writes them, so the newest event of its file is enough.
        self.after_unix_s = _clock_of(run.journal / f"{FLOW_WRITER}.jsonl")
        self._appending = threading.Lock()
        self._full = False
        self.unwritten = b""
        """Bytes that did not fit on the disk."""

    def append(self, kind: str, *, durable: bool = False, **fields: Any) -> Event:
        """Append one event and return it.

        Args:
            kind: one of the kinds in ``hlatctl.run.events``, whose types of fields are checked by readers only.
            durable: fsync before returning, so that the event survives a power cut.
            fields: JSON values. NaN and infinities are written as strings, because JSON doesn't have them.

        Raises:
            StorageError: it can't be written for a reason other than a full disk, or too many bytes are waiting.
        """
        with self._appending:
            now_unix_s = self._now_unix_s()
            is_back = now_unix_s < self.after_unix_s
            event: Event = {
                "v": LINE_VERSION,
                "seq": self._seq,
                "time_unix_s": now_unix_s,
                **({AFTER: self.after_unix_s + _NEXT_S} if is_back else {}),
                "attempt": self.attempt,
                "kind": kind,
                **{key: _json_safe(value) for key, value in fields.items()},
            }
            self._write(to_line(event))
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
            StorageError: they can't be written for a reason other than a full disk.
        """
        with self._appending:
            self._write(b"")

    def events(self) -> list[Event]:
        """Return the events of this file, which is much smaller than a run's journal."""
        return _events_of(self.path)

    def close(self) -> None:
        """Write the remaining events if there is space, and release the file."""
        with suppress(StorageError, RunBusyError):  # append has already raised it
            self.flush()
        self._file.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.close()
        if self._full and failure is None:  # the caller relies on these events
            raise self._not_written(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _write(self, line: bytes) -> None:
        self._check()
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
        return cannot_write(self.path, error)

    def _cut_torn_line(self) -> None:
        start = self._file.seek(0, os.SEEK_END)
        complete = -1  # length up to the last end of line
        while start and complete < 0:  # usually once: the last block has one
            end, start = start, self._file.seek(max(0, start - _SMALL_BYTES))
            complete = start + at + 1 if (at := self._file.read(end - start).rfind(b"\n")) >= 0 else -1
        self._file.truncate(max(0, complete))
        self._file.seek(0, os.SEEK_END)


def _clock_of(path: Path) -> float:
    """Return the time that orders a file's newest event; minus infinity if there is none, or it can't be read."""
    with suppress(OSError):
        if path.is_file() and (last := last_event(path)):
            return order_unix_s(last)
    return -math.inf


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

    Args:
        offsets: offsets to continue from.
        wanted: returns whether to parse a line; others are skipped. None: parse every line.
    """

    def __init__(
        self, run: RunPaths, offsets: dict[str, int] | None = None, *, wanted: Callable[[bytes], bool] | None = None
    ) -> None:
        self._journal, self._wanted = run.journal, wanted
        self._own: dict[str, list[Event]] = {}
        self._reported: set[str] = set()
        #: Bytes of a file that were searched for lines. If more without an end of line follow, nothing is read again.
        self._searched: dict[str, int] = {}
        self.places: dict[str, Place] = {stem: (at, -math.inf, 0, 0.0) for stem, at in (offsets or {}).items()}
        #: The time that orders the newest event, which is at least that of any event before it.
        self.clock_unix_s = -math.inf
        #: A file ended with damaged lines. If more follow, reading from the beginning counts them together.
        self.ends_damaged = False

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes read, by file stem."""
        return {stem: place[0] for stem, place in self.places.items()}

    @property
    def bytes_read(self) -> int:
        """Bytes read of all files."""
        return sum(place[0] for place in self.places.values())

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
        return list(self.stream())

    def stream(self) -> Iterator[Event]:
        """Yield the events since the last call, in order of time. The memory doesn't grow with their number.

        An event counts as read when the caller takes the next one.

        Raises:
            StorageError: a file of the journal can't be read.
        """
        sources = [*self._own_items(), *self._new_items()]
        for clock_unix_s, writer, index, event, place in heapq.merge(*sources):
            self.clock_unix_s = clock_unix_s
            self.ends_damaged |= index == _AT_END
            yield event
            self.places[writer] = place

    def _own_items(self) -> Iterator[Iterator[_Item]]:
        for writer, own in self._own.items():
            if own:
                self._own[writer] = []
                yield _ordered(own, writer, self.places.get(writer, _BEGIN))

    def _new_items(self) -> Iterator[Iterator[_Item]]:
        """Yield an iterator for each file with new bytes. Every other file costs microseconds."""
        for stem, path, mode, size_bytes in _files(self._journal):
            if stem in self._own:
                continue
            if not stat.S_ISREG(mode):
                if stem not in self._reported:
                    self._reported.add(stem)
                    now: Event = {"seq": 0, "time_unix_s": os.lstat(path).st_mtime}
                    note = warning(f"journal/{stem}.jsonl: is not a regular file, ignored", stem, now)
                    yield iter([(now["time_unix_s"], stem, 0, note, _BEGIN)])
            elif size_bytes > self.places.get(stem, _BEGIN)[0]:
                yield self._read(path, stem, size_bytes)

    def _read(self, path: str, stem: str, size_bytes: int) -> Iterator[_Item]:
        try:
            place = self.places.get(stem) or (0, -math.inf, 0, os.stat(path).st_mtime)
            with open(path, "rb") as file:
                if place[0] < self._searched.get(stem, 0) <= size_bytes:
                    file.seek(self._searched[stem])
                    if not _has_line_end(file, size_bytes):
                        self._searched[stem] = size_bytes
                        return
                file.seek(place[0])
                small = size_bytes - place[0] < _SMALL_BYTES
                source: IO[bytes] = io.BytesIO(file.read(size_bytes - place[0])) if small else file
                if small:
                    file.close()
                yield from _items(source, path, place, size_bytes, self._wanted)
                self._searched[stem] = size_bytes
        except OSError as error:
            raise StorageError(f"{path}: can't be read ({error.strerror})", hint="`ls -l` shows whose it is") from None


def read_events(run: RunPaths, *, wanted: Callable[[bytes], bool] | None = None) -> list[Event]:
    """Return the events of a run in order of time, each with its ``writer`` (file stem).

    Args:
        wanted: returns whether to parse a line; others are skipped. None: parse every line. A run has
            millions of steps, and they take seconds.
    """
    return JournalTail(run, wanted=wanted).read_new()


def writer_events(run: RunPaths, writer: str) -> list[Event]:
    """Return the events of one writer, whose file must be much smaller than the run's journal.

    Raises:
        StorageError: the file can't be read.
    """
    path = run.journal / f"{writer}.jsonl"
    try:
        return _events_of(path) if path.is_file() else []
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror})", hint="`ls -l` shows whose it is") from None


def _events_of(path: Path) -> list[Event]:
    with path.open("rb") as file:
        return [item[3] for item in _items(file, os.fspath(path), _BEGIN, os.fstat(file.fileno()).st_size)]


def no_steps(line: bytes) -> bool:
    """Return whether a line holds an event other than a ``step``; for ``wanted``."""
    return b'"kind":"step"' not in line


_BEGIN: Place = (0, -math.inf, 0, 0.0)


def _has_line_end(file: IO[bytes], size_bytes: int) -> bool:
    """Return whether a line ends between a file's position and this size."""
    while count := min(_SMALL_BYTES, size_bytes - file.tell()):
        block = file.read(count)
        if not block or b"\n" in block:
            return bool(block)
    return False


def _ordered(events: list[Event], writer: str, place: Place) -> Iterator[_Item]:
    """Yield events that are not read from the file; the writer's offset stays."""
    clock_unix_s = place[1]
    for index, event in enumerate(events):
        clock_unix_s = max(clock_unix_s, order_unix_s(event))
        place = (place[0], clock_unix_s, event["seq"], event["time_unix_s"])
        yield clock_unix_s, writer, index, event, place


def _items(
    source: IO[bytes], path: str, place: Place, size_bytes: int, wanted: Callable[[bytes], bool] | None = None
) -> Iterator[_Item]:
    """Yield the events of a file's complete lines, and one warning for each series of damaged lines.

    A clock that is set back does not reorder a writer's events, nor those that another writer wrote after it had seen
    them (``AFTER``).

    Args:
        source: the file, positioned at ``place``.
        path: its path.
        place: offset where reading begins.
        size_bytes: offset where reading ends.
        wanted: see :class:`JournalTail`.
    """
    offset, clock_unix_s, seq, time_unix_s = place
    writer = Path(path).stem
    before = damaged = first = index = 0
    for number, (line, length) in enumerate(files.lines(source, MAX_BYTES), 1):
        end = offset + length
        if end > size_bytes or line[-1] != 10:  # b"\n"
            break
        if wanted is not None and not wanted(line):
            offset = end
            continue
        event = parse_line(line.rstrip(b"\r\n")) if length <= MAX_BYTES else None
        if event is None:
            if line.strip(b"\r\n"):
                before = before or _count_lines(path, place[0])
                damaged, first = damaged + 1, first if damaged else before + number
        else:
            event["writer"] = writer
            if damaged:
                beside = {"seq": seq or event["seq"], "time_unix_s": time_unix_s if seq else event["time_unix_s"]}
                clock_unix_s = max(clock_unix_s, beside["time_unix_s"])
                note = ignored(damaged, first, writer, beside)
                yield clock_unix_s, writer, index, note, (offset, clock_unix_s, seq, time_unix_s)
                damaged, index = 0, index + 1
            seq, time_unix_s = event["seq"], event["time_unix_s"]
            clock_unix_s = max(clock_unix_s, order_unix_s(event))
            yield clock_unix_s, writer, index, event, (end, clock_unix_s, seq, time_unix_s)
            index += 1
        offset = end
    if damaged:
        beside = {"seq": seq, "time_unix_s": time_unix_s}
        clock_unix_s = max(clock_unix_s, time_unix_s)
        note = ignored(damaged, first, writer, beside)
        yield clock_unix_s, writer, _AT_END, note, (offset, clock_unix_s, seq, time_unix_s)


def _count_lines(path: str, offset: int) -> int:
    """Return the number of lines before an offset. It reads 1 GB/s, and only a damaged journal asks for it."""
    count = 0
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(_SMALL_BYTES, offset))):
            count, offset = count + block.count(b"\n"), offset - len(block)
    return count


def _files(journal: Path) -> list[tuple[str, str, int, int]]:
    found = []
    try:
        with os.scandir(journal) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl"):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        status = entry.stat(follow_symlinks=False)
                    found.append((entry.name.removesuffix(".jsonl"), entry.path, status.st_mode, status.st_size))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"{journal}: can't be read ({error.strerror})", hint="`ls -l` shows whose it is") from None
    return sorted(found)


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
