"""A journal in order of time, with its steps as columns. Pure.

A run has millions of steps, and ``hlatctl.run.steps`` has read them already. They are put between the other events as
:func:`hlatctl.run.journal.read_events` orders them: steps and events of their writer by number, others by time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hlatctl.run.errors import DependencyError
from hlatctl.run.journal import TRAIN_WRITER, Event, train_writer
from hlatctl.run.steps import StepSeries

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


@dataclass(frozen=True)
class Steps:
    """All steps of a journal, also those that count no more, by row.

    Args:
        time_us: their Unix times, which never go back.
        attempt, step: numbers.
        own_us: the measured time of a step; 0 if it is missing.
        length_us, wait_us: of all steps that the row stands for, and their wait for data.
        counts: whether no later step replaced it.
    """

    time_us: Array
    attempt: Array
    step: Array
    own_us: Array
    length_us: Array
    wait_us: Array
    counts: Array


def sequence(events: Iterable[Event], series: StepSeries) -> tuple[list[Item], Steps]:
    """Return a journal in order of time. The memory is about 40 bytes a step, and more while it is made.

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
    marks = [event for event in map(_light, events) if event["kind"] != STEP and math.isfinite(event["time_unix_s"])]
    marks, positions = _places(marks, series)
    # The clocks of writers differ; make the times monotonic.
    rows_us = _rounded_us(series, "time_unix_s")
    times_us = np.insert(rows_us, positions, [round(event["time_unix_s"] * 1e6) for event in marks])
    times_us = np.maximum.accumulate(times_us, out=times_us)
    at = positions + np.arange(len(marks))
    marks_us = times_us[at].tolist()
    steps = _steps(series, np.delete(times_us, at))
    return _items(marks, marks_us, positions, steps), steps


def _light(event: Event) -> Event:
    """Return an event without the fields that don't matter: those of 2,048 processes are large."""
    if event["kind"].startswith(_TELLING) or event["kind"] == "checkpoint_written":
        return event
    return {name: event.get(name) for name in ("kind", "attempt", "writer", "time_unix_s", "seq")}


def _places(marks: list[Event], series: StepSeries) -> tuple[list[Event], Array]:
    """Return the events in their order, and the number of steps before each."""
    import numpy as np

    own = [event for event in marks if event.get("writer") == _STEPS_BY]
    others = [event for event in marks if event.get("writer") != _STEPS_BY]
    numbers, rows_s = (np.asarray(column) for column in series.rows.columns("seq", "time_unix_s"))
    before = np.searchsorted(np.maximum.accumulate(numbers), np.array([event["seq"] for event in own], dtype=np.int64))
    before = np.maximum.accumulate(before)
    # Of the steps and the events of their writer: the times in their order, and where the events are.
    clock_s = np.maximum.accumulate(np.insert(rows_s, before, [event["time_unix_s"] for event in own]))
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


def _after_clock(others: list[Event], clock_s: Array) -> Array:
    """Return how many entries of a series of times precede each event."""
    import numpy as np

    newest_s: dict[str, float] = {}
    times_s, is_later = [], []
    for event in others:
        writer = str(event.get("writer", ""))
        newest_s[writer] = max(newest_s.get(writer, -math.inf), event["time_unix_s"])
        times_s.append(newest_s[writer])
        is_later.append(writer > _STEPS_BY)
    times = np.array(times_s, dtype=np.float64)
    earliest, latest = np.searchsorted(clock_s, times, "left"), np.searchsorted(clock_s, times, "right")
    return np.maximum.accumulate(np.where(np.array(is_later, dtype=bool), latest, earliest))


def _steps(series: StepSeries, time_us: Array) -> Steps:
    import numpy as np

    made = np.asarray(series.rows.columns("steps")[0])
    own_us, wait_us = _rounded_us(series, "step_s"), _rounded_us(series, "data_wait_s")
    counts = np.zeros(len(made), dtype=bool)
    for start, stop in series.ranges:
        counts[start:stop] = True
    attempt, step = (np.asarray(column) for column in series.rows.columns("attempt", "step"))
    return Steps(time_us, attempt, step, own_us, _times(own_us, made), _times(wait_us, made), counts)


def _times(values_us: Array, made: Array) -> Array:
    import numpy as np

    if (made == 1).all():
        return values_us
    fits = values_us.astype(np.float64) * made < _MOST_US
    return np.where(fits, values_us * np.where(fits, made, 1), _MOST_US)


def _rounded_us(series: StepSeries, name: str) -> Array:
    """Return seconds as microseconds; 0 where a duration is missing, not finite or negative."""
    import numpy as np

    values = np.asarray(series.rows.columns(name)[0]) * 1e6
    values[~np.isfinite(values)] = 0.0
    np.clip(values, -_MOST_US if name == "time_unix_s" else 0, _MOST_US, out=values)
    return np.rint(values, out=values).astype(np.int64)


def _items(marks: list[Event], marks_us: list[int], positions: Array, steps: Steps) -> list[Item]:
    import numpy as np

    changes = np.flatnonzero(np.diff(steps.attempt)) + 1
    edges = np.unique(np.concatenate([[0, len(steps.attempt)], changes, positions])).tolist()
    waiting = zip(marks, marks_us, positions.tolist(), strict=True)
    mark = next(waiting, None)
    items = []
    for first, stop in itertools.zip_longest(edges, edges[1:]):
        while mark is not None and mark[2] == first:
            event, time_us, row = mark
            is_train = str(event.get("writer", "")).startswith(TRAIN_WRITER)
            items.append(Item(event["kind"], event["attempt"], is_train, event, time_us, time_us, row, row))
            mark = next(waiting, None)
        if stop is not None:
            span_us = int(steps.time_us[first]), int(steps.time_us[stop - 1])
            items.append(Item(STEP, int(steps.attempt[first]), True, _NOTHING, *span_us, first, stop))
    return items
