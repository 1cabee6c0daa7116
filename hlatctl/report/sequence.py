"""A journal in order of time, with its steps as columns. Pure.

A run has millions of steps, and ``hlatctl.run.steps`` has read them already. They are put between the other events as
:func:`hlatctl.run.journal.read_events` orders them: steps and events of their writer by number, others by time.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hlatctl.run.errors import DependencyError
from hlatctl.run.journal import TRAIN_WRITER, Event, train_writer
from hlatctl.run.steps import SEGMENT_ROWS, StepSeries

if TYPE_CHECKING:
    import numpy as np

#: Of numpy, which is imported when it is needed.
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

STEP = "step"
#: One training process writes all steps.
_STEPS_BY = train_writer(0)
#: Events of other kinds matter only by their time. There is one for every few steps, and some are large.
_TELLING = ("head_", "run_", "attempt_", "stage_", "stop_", "train_", "compile_", "milestone", "eval_", "job_")
_NOTHING: Event = {}
#: Longer times are cut to this one, 36,000 years in microseconds: sums of a few fit in 64 bits.
_MOST_US = 1 << 60
#: Steps that are in memory at once, as they lie in files.
BLOCK_ROWS = SEGMENT_ROWS


class Item(NamedTuple):
    """An event, or neighbouring steps of one attempt.

    Args:
        kind, attempt: of the event; ``step`` for steps.
        is_train: a training process wrote it.
        event: the event, with the fields that matter; empty for steps.
        start_us, end_us: Unix times of the first and the last step; the same for an event. Times never go back.
        first, stop: rows of the steps; for an event, both are the number of rows before it.
    """

    kind: str
    attempt: int
    is_train: bool
    event: Event
    start_us: int
    end_us: int
    first: int
    stop: int


class _Mark(NamedTuple):
    """An event, with its fields if they matter: those of 2,048 processes are large."""

    kind: str
    attempt: int
    writer: str
    time_unix_s: float
    seq: int
    event: Event

    @classmethod
    def of(cls, event: Event) -> _Mark:
        kind = sys.intern(event["kind"])
        kept = event if kind.startswith(_TELLING) or kind == "checkpoint_written" else _NOTHING
        return cls(
            kind, event["attempt"], sys.intern(str(event.get("writer", ""))), event["time_unix_s"], event["seq"], kept
        )


class Block(NamedTuple):
    """Neighbouring steps of a journal, also those that count no more.

    Args:
        first: row of the first one.
        time_us: their Unix times, which never go back.
        attempt, step: numbers.
        own_us: the measured time of a step; 0 if it is missing.
        length_us, wait_us: of all steps that the row stands for, and their wait for data.
        counts: whether no later step replaced it.
    """

    first: int
    time_us: Array
    attempt: Array
    step: Array
    own_us: Array
    length_us: Array
    wait_us: Array
    counts: Array


@dataclass(frozen=True)
class Steps:
    """All steps of a journal.

    Args:
        series: the steps.
        time_us: their Unix times, which never go back.
    """

    series: StepSeries
    time_us: Array

    def blocks(self) -> Iterator[Block]:
        """Yield the steps in order. The memory doesn't depend on their number."""
        for first in range(0, len(self.time_us), BLOCK_ROWS):
            yield self._block(first, min(len(self.time_us), first + BLOCK_ROWS))

    def _block(self, first: int, stop: int) -> Block:
        import numpy as np

        names = ("attempt", "step", "steps", "step_s", "data_wait_s")
        columns = self.series.rows.columns(*names, ranges=[(first, stop)])
        attempt, step, made, own_s, wait_s = (np.asarray(column) for column in columns)
        own_us, wait_us = _rounded_us(own_s, 0), _rounded_us(wait_s, 0)
        counts = np.zeros(stop - first, dtype=bool)
        for start, end in self.series.ranges:
            counts[max(0, start - first) : max(0, end - first)] = True
        time_us = self.time_us[first:stop]
        return Block(first, time_us, attempt, step, own_us, _times(own_us, made), _times(wait_us, made), counts)


def sequence(events: Iterable[Event], series: StepSeries) -> tuple[list[Item], Steps]:
    """Return a journal in order of time. The memory is 8 bytes a step, and 50 while it is made.

    Args:
        events: in order of time; steps among them are ignored.
        series: the steps.

    Raises:
        DependencyError: numpy is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise DependencyError("goodput needs numpy", hint="pip install 'hlatctl[head]'") from None
    others = (event for event in events if event["kind"] != STEP and math.isfinite(event["time_unix_s"]))
    marks, positions = _places([_Mark.of(event) for event in others], series)
    # The clocks of writers differ; make the times monotonic.
    times_us = _rounded_us(np.asarray(series.rows.columns("time_unix_s")[0]), -_MOST_US)
    times_us = np.insert(times_us, positions, [round(mark.time_unix_s * 1e6) for mark in marks])
    times_us = np.maximum.accumulate(times_us, out=times_us)
    at = positions + np.arange(len(marks))
    marks_us = times_us[at].tolist()
    steps = Steps(series, np.delete(times_us, at))
    del times_us
    return _items(marks, marks_us, positions, steps), steps


def _places(marks: list[_Mark], series: StepSeries) -> tuple[list[_Mark], Array]:
    """Return the events in their order, and the number of steps before each."""
    import numpy as np

    own = [mark for mark in marks if mark.writer == _STEPS_BY]
    others = [mark for mark in marks if mark.writer != _STEPS_BY]
    numbers, clock_s = (np.asarray(column) for column in series.rows.columns("seq", "time_unix_s"))
    numbers = np.maximum.accumulate(numbers, out=numbers)
    before = np.searchsorted(numbers, np.array([mark.seq for mark in own], dtype=np.int64))
    del numbers
    before = np.maximum.accumulate(before)
    # Of the steps and the events of their writer: the times in their order, and where the events are.
    clock_s = np.insert(clock_s, before, [mark.time_unix_s for mark in own])
    clock_s = np.maximum.accumulate(clock_s, out=clock_s)
    own_at = before + np.arange(len(own))
    others_at = _after_clock(others, clock_s)
    rows_before = others_at - np.searchsorted(own_at, others_at)
    order = sorted(
        itertools.chain(
            ((at, 0, number) for number, at in enumerate(others_at.tolist())),
            ((at, 1, number) for number, at in enumerate(own_at.tolist())),
        )
    )
    merged = [(own if which else others)[number] for _, which, number in order]
    places = [(before if which else rows_before)[number] for _, which, number in order]
    return merged, np.array(places, dtype=np.int64)


def _after_clock(others: list[_Mark], clock_s: Array) -> Array:
    """Return how many entries of a series of times precede each event."""
    import numpy as np

    newest_s: dict[str, float] = {}
    times_s, is_later = [], []
    for mark in others:
        newest_s[mark.writer] = max(newest_s.get(mark.writer, -math.inf), mark.time_unix_s)
        times_s.append(newest_s[mark.writer])
        is_later.append(mark.writer > _STEPS_BY)
    times = np.array(times_s, dtype=np.float64)
    earliest, latest = np.searchsorted(clock_s, times, "left"), np.searchsorted(clock_s, times, "right")
    return np.maximum.accumulate(np.where(np.array(is_later, dtype=bool), latest, earliest))


def _times(values_us: Array, made: Array) -> Array:
    import numpy as np

    if (made == 1).all():
        return values_us
    fits = values_us.astype(np.float64) * made < _MOST_US
    return np.where(fits, values_us * np.where(fits, made, 1), _MOST_US)


def _rounded_us(seconds: Array, least_us: int) -> Array:
    """Return seconds as microseconds; 0 where they are missing or not finite, and at least ``least_us``."""
    import numpy as np

    values = seconds * 1e6
    values[~np.isfinite(values)] = 0.0
    np.clip(values, least_us, _MOST_US, out=values)
    return np.rint(values, out=values).astype(np.int64)


def _items(marks: list[_Mark], marks_us: list[int], positions: Array, steps: Steps) -> list[Item]:
    import numpy as np

    attempt = np.asarray(steps.series.rows.columns("attempt")[0])
    changes = np.flatnonzero(attempt[1:] != attempt[:-1]) + 1
    edges = np.unique(np.concatenate([[0, len(attempt)], changes, positions])).tolist()
    waiting = zip(marks, marks_us, positions.tolist(), strict=True)
    mark = next(waiting, None)
    items = []
    for first, stop in itertools.zip_longest(edges, edges[1:]):
        while mark is not None and mark[2] == first:
            event, time_us, row = mark
            is_train = event.writer.startswith(TRAIN_WRITER)
            items.append(Item(event.kind, event.attempt, is_train, event.event, time_us, time_us, row, row))
            mark = next(waiting, None)
        if stop is not None:
            span_us = int(steps.time_us[first]), int(steps.time_us[stop - 1])
            items.append(Item(STEP, int(attempt[first]), True, _NOTHING, *span_us, first, stop))
    return items
