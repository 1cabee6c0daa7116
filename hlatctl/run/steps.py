"""The steps of a run as columns of numbers: 128 bytes each, and 8 more for each number without a row of the table.

A run has millions of steps. Rows are only appended, even those of steps that no longer count. Full segments can be
moved to files, so that the memory of a process does not grow with its run.
"""

from __future__ import annotations

import math
import os
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from hlatctl.run.files import new_file, read_bytes
from hlatctl.run.journal import Event
from hlatctl.run.step_metrics import MOST_OTHERS, PLACE, STEP_METRICS, TIME, others

#: Fields of a ``step`` event that every run keeps.
FIELDS = (*PLACE, TIME, *(metric.name for metric in STEP_METRICS if metric.kept))
_COLUMN = {name: index for index, name in enumerate(FIELDS)}
#: This column has a bit for each field that the event has. Columns of numbers without a row of the table follow it.
_PRESENT = len(FIELDS)
_CODES = "q" * len(PLACE) + "d" * (len(FIELDS) - len(PLACE)) + "q"
_LIMIT = 1 << 63
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
#: Rows of a segment: 8 MiB.
SEGMENT_ROWS = 1 << 16
_COLUMN_BYTES = 8 * SEGMENT_ROWS
#: Losses in ``Rows.thinned`` at which every second one is dropped.
_MOST_THINNED = 128

Columns = Sequence["array[Any] | memoryview"]


@dataclass(frozen=True)
class Segment:
    """A file of ``SEGMENT_ROWS`` rows, column after column. Its name holds its CRC-32."""

    path: Path
    crc: int
    columns: int


@dataclass(frozen=True)
class Home:
    """Where full segments are stored.

    Args:
        rebuild: returns the rows from the journal if a file is missing or damaged.
    """

    folder: Path
    rebuild: Callable[[], Rows]


class Rows:
    """Rows in the order of their events.

    Args:
        home: None: all rows stay in memory.
    """

    def __init__(self, home: Home | None = None) -> None:
        self.home = home
        #: Numbers without a row of the table, in the order in which they first came.
        self.others: list[str] = []
        self.segments: list[Segment] = []
        self.tail: list[array[Any]] = [array(code) for code in _CODES]
        #: The loss of every ``stride``-th row. A list of many runs draws it without reading their segments.
        self.thinned, self.stride = array("d"), 1
        self._loaded: tuple[int, Columns] = (-1, ())

    def __len__(self) -> int:
        return len(self.segments) * SEGMENT_ROWS + len(self.tail[0])

    def append(self, event: Event) -> None:
        """Append a step event.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: step or tokens are missing, or a number is too large.
        """
        present, values = 0, []
        for index, name in enumerate(FIELDS):
            value = event.get(name)
            if value is not None:
                present |= 1 << index
            values.append(_whole(name, value) if index < len(PLACE) else _number(value))
        more = [_number(event.get(name)) for name in self._names(event)]
        if len(self) % self.stride == 0:
            self.thinned.append(values[_COLUMN["loss"]])
            if len(self.thinned) == _MOST_THINNED:
                self.thinned, self.stride = self.thinned[::2], 2 * self.stride
        for column, value in zip(self.tail, (*values, present, *more), strict=True):
            column.append(value)
        if len(self.tail[0]) == SEGMENT_ROWS and self.home:
            self._seal(self.home)

    def place(self, name: str) -> int:
        """Return the index of a field's column.

        Raises:
            ValueError: the run has no such field.
        """
        return _COLUMN[name] if name in _COLUMN else _PRESENT + 1 + self.others.index(name)

    def at(self, name: str, row: int) -> Any:
        """Return one number of a row."""
        columns, index = self._find(row)
        return columns[self.place(name)][index]

    def event(self, row: int) -> Event:
        """Return a row as an event with the fields that it had."""
        columns, index = self._find(row)
        present = columns[_PRESENT][index]
        event: Event = {"kind": "step"}
        for number, name in enumerate(FIELDS):
            if present >> number & 1:
                event[name] = _as_json(columns[number][index])
        for name, column in zip(self.others, columns[_PRESENT + 1 :], strict=False):
            if not math.isnan(column[index]):
                event[name] = _as_json(column[index])
        return event

    def columns(self, *names: str, ranges: Sequence[Sequence[int]] | None = None) -> list[array[Any]]:
        """Return fields of all rows, or of ranges of them. A number that is missing is NaN; a whole number, 0."""
        places = [self.place(name) for name in names]
        found: list[array[Any]] = [array(_CODES[at] if at < _PRESENT else "d") for at in places]
        for start, stop in [(0, len(self))] if ranges is None else ranges:
            for columns, first, last in self.blocks(start, stop):
                for values, at in zip(found, places, strict=True):
                    if at < len(columns):
                        values.frombytes(columns[at][first:last].tobytes())
                    else:  # a segment from before this number appeared
                        values.extend([math.nan] * (last - first))
        return found

    def blocks(self, start: int, stop: int) -> Iterator[tuple[Columns, int, int]]:
        """Yield the columns that hold the rows from start to stop, with the first and the last index in them."""
        while start < stop:
            columns, first = self._find(start)
            last = min(len(columns[0]), first + stop - start)
            yield columns, first, last
            start += last - first

    def _find(self, row: int) -> tuple[Columns, int]:
        number, index = divmod(row, SEGMENT_ROWS)
        if number >= len(self.segments):
            return self.tail, row - len(self.segments) * SEGMENT_ROWS
        if self._loaded[0] != number:
            self._loaded = number, self._load(number)
        return self._loaded[1], index

    def _load(self, number: int) -> Columns:
        segment = self.segments[number]
        size = segment.columns * _COLUMN_BYTES
        try:
            content = read_bytes(segment.path, most=size)
        except OSError:
            content = b""
        if len(content) == size and zlib.crc32(content) == segment.crc:
            view = memoryview(content)
            parts = (view[at : at + _COLUMN_BYTES] for at in range(0, len(content), _COLUMN_BYTES))
            codes = _CODES + "d" * (segment.columns - len(_CODES))
            return [part.cast(code) for part, code in zip(parts, codes, strict=True)]  # type: ignore[call-overload]
        assert self.home is not None, "segments are kept there"
        with suppress(OSError):
            segment.path.unlink()  # the next process that folds the journal writes it again
        rebuilt = self.home.rebuild()
        first = number * SEGMENT_ROWS
        return [column[first : first + SEGMENT_ROWS] for column in rebuilt.tail[: segment.columns]]

    def _names(self, event: Event) -> list[str]:
        """Return the numbers without a row of the table, including new ones of this event."""
        for name in others(event):
            if name not in self.others and len(self.others) < MOST_OTHERS:
                self.others.append(name)
                self.tail.append(array("d", repeat(math.nan, len(self.tail[0]))))
        return self.others

    def _seal(self, home: Home) -> None:
        """Move the rows in memory to a file. If it can't be written, they stay there."""
        content = b"".join(column.tobytes() for column in self.tail)
        crc = zlib.crc32(content)
        path = home.folder / segment_name(len(self.segments), crc)
        try:
            if not path.exists() or read_bytes(path, most=len(content)) != content:
                write_derived(path, [content])
        except OSError:
            self.home = None
            return
        self.segments.append(Segment(path, crc, len(self.tail)))
        self.tail = [array(column.typecode) for column in self.tail]


class StepSeries(Mapping[int, Event]):
    """The steps that count, by step, in order. Each is an event with the fields in ``FIELDS``.

    Args:
        home: see :class:`Home`.
    """

    def __init__(self, home: Home | None = None) -> None:
        self.rows = Rows(home)
        #: Rows that count: from, and up to. Their steps ascend. Each restart adds a range.
        self.ranges: list[list[int]] = []

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.ranges:
            for columns, first, last in self.rows.blocks(start, stop):
                yield from columns[0][first:last]

    def __getitem__(self, step: int) -> Event:
        row = self._place(step)
        if row is None or self.rows.at("step", row) != step:
            raise KeyError(step)
        return self.rows.event(row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepSeries):
            return NotImplemented
        names = (*FIELDS, *self.rows.others)
        return (
            len(self) == len(other)
            and self.rows.others == other.rows.others
            and all(self._same(other, name) for name in names)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def newest(self) -> int:
        """The newest step; 0 if there is none."""
        return int(self.rows.at("step", self.ranges[-1][1] - 1)) if self.ranges else 0

    @property
    def newest_tokens(self) -> int:
        """Tokens of the newest step; 0 if there is none."""
        return int(self.rows.at("tokens", self.ranges[-1][1] - 1)) if self.ranges else 0

    def last(self, count: int) -> Iterator[Event]:
        """Yield the newest steps, newest first. The cost doesn't depend on the length of the run."""
        return self._before(self.ranges, count)

    def until(self, tokens: int, count: int) -> Iterator[Event]:
        """Yield the newest steps up to the first one that reached these tokens, newest first. None if none did."""
        at = bisect_left(self.ranges, tokens, key=lambda part: self.rows.at("tokens", part[1] - 1))
        if at == len(self.ranges):
            return iter(())
        start, stop = self.ranges[at]
        row = bisect_left(range(start, stop), tokens, key=lambda row: self.rows.at("tokens", row)) + start
        return self._before([*self.ranges[:at], [start, row + 1]], count)

    def first(self, count: int) -> Iterator[Event]:
        """Yield the first steps."""
        for start, stop in self.ranges:
            for row in range(start, min(stop, start + count)):
                yield self.rows.event(row)
            count -= min(count, stop - start)

    def columns(self, *names: str) -> list[array[Any]]:
        """Return fields of all steps that count, in order. A number that is missing is NaN; a whole number, 0."""
        return self.rows.columns(*names, ranges=self.ranges)

    def losses(self) -> list[float]:
        """Return fewer than 128 losses of the steps that count, in order and evenly spaced. Reads no file."""
        thinned, stride = self.rows.thinned, self.rows.stride
        return [loss for start, stop in self.ranges for loss in thinned[-(-start // stride) : -(-stop // stride)]]

    def add(self, event: Event) -> None:
        """Add a step, replacing an earlier one with the same number.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: see :meth:`Rows.append`.
        """
        row, step = len(self.rows), event["step"]
        newest = self.newest
        self.rows.append(event)
        if step <= newest:
            self._insert(step, row)
        elif self.ranges and self.ranges[-1][1] == row:
            self.ranges[-1][1] += 1
        else:
            self.ranges.append([row, row + 1])

    def supersede(self, after: int) -> None:
        """Drop the steps after this one, because they are trained again."""
        while self.ranges and self.rows.at("step", self.ranges[-1][0]) > after:
            self.ranges.pop()
        if self.ranges:
            self.ranges[-1][1] = self._after(self.ranges[-1][0], self.ranges[-1][1], after)

    def _before(self, ranges: list[list[int]], count: int) -> Iterator[Event]:
        for start, stop in reversed(ranges):
            for row in range(stop - 1, max(start, stop - count) - 1, -1):
                yield self.rows.event(row)
            count -= min(count, stop - start)

    def _same(self, other: StepSeries, name: str) -> bool:
        return bool(self.columns(name)[0].tobytes() == other.columns(name)[0].tobytes())

    def _insert(self, step: int, row: int) -> None:
        """Insert a late row between those that count. Only a damaged or edited journal has one."""
        ranges: list[list[int]] = []
        for start, stop in self.ranges:
            middle = self._after(start, stop, step)
            before = middle - (middle > start and self.rows.at("step", middle - 1) == step)
            ranges += [[start, before], [middle, stop]]
        ranges = [part for part in ranges if part[0] < part[1]]
        at = sum(1 for start, _ in ranges if self.rows.at("step", start) < step)
        self.ranges = [*ranges[:at], [row, row + 1], *ranges[at:]]

    def _after(self, start: int, stop: int, step: int) -> int:
        return bisect_right(range(start, stop), step, key=lambda row: self.rows.at("step", row)) + start

    def _place(self, step: int) -> int | None:
        at = bisect_right(self.ranges, step, key=lambda part: self.rows.at("step", part[0])) - 1
        return self._after(self.ranges[at][0], self.ranges[at][1], step) - 1 if at >= 0 else None


def segment_name(number: int, crc: int) -> str:
    """Return the name of a segment's file."""
    return f"rows-{number:05d}-{crc:08x}"


def write_derived(path: Path, parts: Sequence[bytes]) -> None:
    """Write a derived file of a run completely or not at all, as readable as its journal.

    Raises:
        OSError: it can't be written.
    """
    mode = path.parent.parent.stat().st_mode & 0o777
    if not path.parent.is_dir():
        path.parent.mkdir()
        path.parent.chmod(mode)
    with new_file(path) as temporary, temporary.open("wb") as file:
        os.fchmod(file.fileno(), mode & 0o666)
        file.writelines(parts)


def _whole(name: str, value: Any) -> int:
    if value is None and name in ("step", "tokens"):
        raise KeyError(name)
    if name == "steps" and (type(value) is not int or value < 1):
        return 1
    number = int(value or 0)
    if not -_LIMIT <= number < _LIMIT:
        raise OverflowError(f"{name}={value}")
    return number


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    return _NOT_FINITE[value] if isinstance(value, str) else math.nan if value is None else float(value)


def _as_json(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
