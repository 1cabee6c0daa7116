"""Goodput of a run: its wall time by category, its cost, and the best checkpoint interval. Pure.

``account`` assigns the wall time to categories; every microsecond belongs to one. *Phases* are what the run did
between two events. *Claims* are the times that the trainer measured: its steps and its checkpoint stalls. Claims never
overlap, and they have priority over phases.

A run has millions of steps, which ``hlatctl.run.steps`` has already read. They are handled as columns, block by block,
and merged with the other events as :func:`hlatctl.run.journal.read_events` orders them: steps and events of their
writer by number, others by time. Times are Unix times in microseconds.
"""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from conf.schema import Config
from hlatctl.plan import budget
from hlatctl.plan.budget import COMPARED_TOKENS, baseline_usd_per_4m_tokens
from hlatctl.plan.budget import cost as planned_cost
from hlatctl.plan.step_time import mean_step_s
from hlatctl.report.numbers import column, cost_usd, mean, median, process_hours
from hlatctl.run.errors import DependencyError, install
from hlatctl.run.events import RECOVERY_PHASES
from hlatctl.run.journal import OPERATOR_WRITER, TRAIN_WRITER, Event, train_writer
from hlatctl.run.state import TRAIN_JOB, RunState
from hlatctl.run.steps import SEGMENT_ROWS, StepSeries
from hlatctl.units import duration, number

if TYPE_CHECKING:
    import numpy as np


#: An array of numpy, which is imported when needed.
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

STEP = "step"
#: One training process writes all steps.
_STEPS_BY = train_writer(0)
#: Events of other kinds matter only by their time. There is one for every few steps, and some are large.
_TELLING = ("head_", "run_", "attempt_", "stage_", "stop_", "train_", "compile_", "milestone", "eval_", "job_")
_NOTHING: Event = {}
#: Longer times are cut to this one, 36,000 years in microseconds: sums of a few fit in 64 bits.
_MOST_US = 1 << 60
#: Steps that are in memory at a time, as they are stored in files.
BLOCK_ROWS = SEGMENT_ROWS


class Item(NamedTuple):
    """An event, or consecutive steps of one attempt.

    Args:
        kind, attempt: kind and attempt of the event; the kind is ``step`` for steps.
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
    """An event, with its fields only if they matter: the fields of 2,048 processes are large."""

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
    """Consecutive steps of a journal, including those that no longer count.

    Args:
        first: row of the first step.
        time_us: Unix times of the steps, never decreasing.
        own_us: the measured time of a step; 0 if it is missing.
        length_us, wait_us: time of all steps that the row stands for, and their wait for data.
        counts: whether no later step replaced this one.
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
    """All steps of a journal; their Unix times never decrease."""

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
        events: events in order of time; steps among them are ignored.
    """
    try:
        import numpy as np
    except ImportError:
        raise DependencyError("goodput needs numpy", hint=install("head")) from None
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


PRODUCTIVE, DATA_WAIT, CHECKPOINT_STALL = "productive", "data_wait", "checkpoint_stall"
LOST, COMPILE = "lost", "compile"


@dataclass(frozen=True)
class Bounds:
    """Where an attempt's steps are.

    Args:
        first, stop: rows from the attempt's start to its trainer's last event.
        start_us, last_us: times of the start and of the last event.
        compiled: whether the trainer compiled graphs.
    """

    attempt: int
    first: int
    stop: int
    start_us: int
    last_us: int
    compiled: bool


class _Rows(NamedTuple):
    row: Array
    which: Array
    end_us: Array
    own_us: Array
    length_us: Array
    wait_us: Array
    stall_us: Array
    counts: Array


class Claims:
    """Times of steps and of the pauses after them. They never overlap.

    Args:
        stalls: pauses for checkpoints in microseconds, by attempt and step.
        begin_us: the journal's first time.
        times_us: times, ascending.

    Attributes:
        totals_us: claimed microseconds by category.
        before_us: claimed microseconds before each of ``times_us``.
    """

    def __init__(
        self,
        steps: Steps,
        attempts: Sequence[Bounds],
        stalls: dict[tuple[int, float], int],
        begin_us: int,
        times_us: Sequence[int],
    ) -> None:
        import numpy as np

        self.totals_us: dict[str, int] = defaultdict(int)
        self.before_us = np.zeros(len(times_us), dtype=np.int64)
        self._times_us, self._newest_us = np.asarray(times_us, dtype=np.int64), begin_us
        self._start_us = np.array([each.start_us for each in attempts], dtype=np.int64)
        self._last_us = np.array([each.last_us for each in attempts], dtype=np.int64)
        self._compiled = np.array([each.compiled for each in attempts], dtype=bool)
        if attempts:
            self._first_row, self._typical_us = _first_steps(_blocks(steps, attempts, {}), len(attempts))
            blocks = itertools.chain(_blocks(steps, attempts, stalls), [None])
            for rows, after in itertools.pairwise(blocks):
                if rows:
                    self._claim(rows, after)

    def _claim(self, rows: _Rows, after: _Rows | None) -> None:
        import numpy as np

        which, end_us, length_us = rows.which, rows.end_us, rows.length_us
        ends_us = np.maximum(end_us, np.minimum(end_us + rows.stall_us, self._free_us(rows, after)))
        earliest_us = np.maximum(np.concatenate([[self._newest_us], ends_us[:-1]]), self._start_us[which])
        # An attempt's first step loads or compiles graphs; the time beyond the median of its others isn't training.
        typical_us = np.where(rows.row == self._first_row[which], self._typical_us[which], length_us)
        start_us = np.maximum(earliest_us, end_us - np.minimum(typical_us, length_us))
        is_compiled = (typical_us < length_us) & self._compiled[which]
        begins_us = np.where(is_compiled, np.maximum(earliest_us, end_us - length_us), start_us)
        waited_us = np.minimum(end_us, start_us + rows.wait_us)
        for category, times_us in (
            (COMPILE, start_us - begins_us),
            (LOST, (end_us - start_us)[~rows.counts]),
            (DATA_WAIT, (waited_us - start_us)[rows.counts]),
            (PRODUCTIVE, (end_us - waited_us)[rows.counts]),
            (CHECKPOINT_STALL, ends_us - end_us),
        ):
            if total_us := int(times_us.sum()):
                self.totals_us[category] += total_us
        self._count(begins_us, ends_us)
        self._newest_us = int(ends_us[-1])

    def _free_us(self, rows: _Rows, after: _Rows | None) -> Array:
        """Return the latest end of the pause after each step, which is the start of the next step.

        The pause follows the step, even if the checkpoint was written later.
        """
        import numpy as np

        free_us = self._last_us[rows.which]
        which, end_us, length_us = rows.which[1:], rows.end_us[1:], rows.length_us[1:]
        if after is not None:
            which = np.append(which, after.which[0])
            end_us = np.append(end_us, after.end_us[0])
            length_us = np.append(length_us, after.length_us[0])
        known = len(which)
        next_us = end_us - np.where(which == rows.which[:known], length_us, 0)
        free_us[:known] = np.minimum(free_us[:known], next_us)
        return free_us

    def _count(self, begins_us: Array, ends_us: Array) -> None:
        import numpy as np

        sums_us = np.concatenate([[0], np.cumsum(ends_us - begins_us)])
        first, stop = np.searchsorted(self._times_us, [begins_us[0], ends_us[-1]])
        times_us = self._times_us[first:stop]
        index = np.searchsorted(begins_us, times_us, "right")
        self.before_us[first:stop] += sums_us[index] - np.maximum(0, ends_us[index - 1] - times_us)
        self.before_us[stop:] += sums_us[-1]


def stalls_us(items: Iterable[Item]) -> dict[tuple[int, float], int]:
    """Return how long training paused for a checkpoint, by attempt and step."""
    stalls: dict[tuple[int, float], int] = defaultdict(int)
    for item in items:
        if item.kind == "checkpoint_written":
            paused_s = stall_s(item.event)
            if math.isfinite(paused_s) and paused_s > 0:
                stalls[item.attempt, number(item.event, "step")] += round(paused_s * 1e6)
    return stalls


def stall_s(event: Event) -> float:
    """Return how long training paused for a ``checkpoint_written`` event; NaN if it is missing or damaged."""
    return number(event, "stall_s" if "stall_s" in event else "wall_s")


def _blocks(steps: Steps, attempts: Sequence[Bounds], stalls: dict[tuple[int, float], int]) -> Iterator[_Rows]:
    import numpy as np

    order = np.argsort(np.array([each.attempt for each in attempts], dtype=np.int64))
    numbers = np.array([attempts[index].attempt for index in order], dtype=np.int64)
    first = np.array([each.first for each in attempts], dtype=np.int64)
    stop = np.array([each.stop for each in attempts], dtype=np.int64)
    saved = np.array([step for _, step in stalls if math.isfinite(step)], dtype=np.float64)
    for block in steps.blocks():
        found = np.minimum(np.searchsorted(numbers, block.attempt), len(numbers) - 1)
        which, row = order[found], block.first + np.arange(len(found))
        inside = (numbers[found] == block.attempt) & (row >= first[which]) & (row < stop[which])
        if inside.any():
            stall_us = _stalls_us(block, saved, stalls)
            columns = (row, which, block.time_us, block.own_us, block.length_us, block.wait_us, stall_us, block.counts)
            yield _Rows(*(column[inside] for column in columns))


def _first_steps(blocks: Iterable[_Rows], attempts: int) -> tuple[Array, Array]:
    """Return the row of each attempt's first step, and the median time of its other steps; -1 if it has no others."""
    import numpy as np

    first_row = np.full(attempts, -1, dtype=np.int64)
    typical_us, own_us = np.zeros(attempts, dtype=np.int64), defaultdict(list)
    for rows in blocks:
        for which in np.unique(rows.which).tolist():
            mine = rows.which == which
            if which not in own_us:
                first_row[which] = rows.row[mine][0]
            own_us[which].append(rows.own_us[mine])
    for which, parts in own_us.items():
        others_us = np.concatenate(parts)[1:]
        parts.clear()
        if len(others_us):
            typical_us[which] = round(float(np.median(others_us, overwrite_input=True)))
        else:
            first_row[which] = -1
    return first_row, typical_us


def _stalls_us(block: Block, saved: Array, stalls: dict[tuple[int, float], int]) -> Array:
    import numpy as np

    paused_us = np.zeros(len(block.step), dtype=np.int64)
    for index in np.flatnonzero(np.isin(block.step, saved)).tolist():
        paused_us[index] = stalls.get((int(block.attempt[index]), float(block.step[index])), 0)
    return paused_us


BETWEEN_STEPS, START, RESTART = "between_steps", "start", "restart:"
END, EVALUATION_WAIT, HEAD, IDLE = "end", "evaluation_wait", "head", "idle"
QUEUED = "queued"
_FINISHED = "finished"
#: Causes of an attempt's end after which training waits for evaluations.
_EVALUATED_AFTER = (_FINISHED, "stage", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Seconds by category, and the failures.

    Args:
        seconds: time by category, which adds up to ``wall_s``. Categories are the constants above, ``restart:CAUSE``
            and the names of stages.
        training_s: time from the first attempt's start to the newest attempt's last event.
        failures: attempts that ended without a last checkpoint and without a request to stop, by cause.
        stalls_s: how long training paused for each checkpoint; NaN if that is damaged.
    """

    seconds: dict[str, float]
    wall_s: float
    training_s: float
    failures: dict[str, int]
    stalls_s: list[float]


@dataclass
class _Attempt:
    started: int
    last: int
    ended: bool = False
    cause: str = ""
    saved: bool = False
    asked: bool = False
    compiled: bool = False


def account(events: Iterable[Event], steps: StepSeries) -> Account:
    """Return the account of a journal's events, or of any prefix of them.

    Args:
        events: events in order of time; steps among them are ignored.
    """
    everything, columns = sequence(_without_later_notes(events), steps)
    items = _without_afterlife(everything)
    if not items:
        return Account(seconds={}, wall_s=0.0, training_s=0.0, failures={}, stalls_s=[])
    attempts = _attempts(items)
    times_us = array("q", (time_us for item in items for time_us in (item.start_us, item.end_us)))
    claims = Claims(columns, _bounds(items, attempts), stalls_us(items), items[0].start_us, times_us)
    totals_us = _totals_us(_phases(items, attempts), times_us, claims)
    return Account(
        seconds={category: total / 1e6 for category, total in totals_us.items()},
        wall_s=(items[-1].end_us - items[0].start_us) / 1e6,
        training_s=_training_us(items, attempts) / 1e6,
        failures=_failures(attempts),
        stalls_s=[stall_s(item.event) for item in everything if item.kind == "checkpoint_written"],
    )


def _without_later_notes(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events without the last ones if people wrote them, such as a note on a run that has ended or died."""
    held: list[Event] = []
    for event in events:
        if event.get("writer") == OPERATOR_WRITER:
            held.append(event)
            continue
        yield from held
        held.clear()
        yield event


def _without_afterlife(items: list[Item]) -> list[Item]:
    """Return the items without those after the run's end, such as later evaluations, which hold no nodes."""
    end = None
    for index, item in enumerate(items):
        if item.kind == "run_finished":
            end = index + 1
        elif item.kind in ("head_started", "attempt_started"):
            end = None
    return items[:end]


def _attempts(items: Sequence[Item]) -> dict[int, _Attempt]:
    attempts: dict[int, _Attempt] = {}
    for index, (kind, attempt_number, is_train, event, *_) in enumerate(items):
        attempt = attempts.get(attempt_number)
        if kind == "attempt_started":
            attempts.setdefault(attempt_number, _Attempt(started=index, last=index))
        elif kind == "stop_requested":
            for open_attempt in attempts.values():
                open_attempt.asked |= not open_attempt.ended
        elif attempt is None or attempt.ended:
            continue  # before the first attempt, or a late event of an ended one
        elif kind == "attempt_ended":
            attempt.ended, attempt.cause = True, str(event.get("cause") or "unknown")
        elif is_train:
            attempt.last = index
            attempt.saved |= kind == "train_stopped" and event.get("reason") in (_FINISHED, "stop", "amend")
            attempt.compiled |= kind == "compile_cache" and number(event, "misses") > 0
    return attempts


def _bounds(items: Sequence[Item], attempts: dict[int, _Attempt]) -> list[Bounds]:
    return [
        Bounds(
            attempt=attempt_number,
            first=items[attempt.started].stop,
            stop=items[attempt.last].stop,
            start_us=items[attempt.started].start_us,
            last_us=items[attempt.last].end_us,
            compiled=attempt.compiled,
        )
        for attempt_number, attempt in attempts.items()
    ]


def _training_us(items: Sequence[Item], attempts: dict[int, _Attempt]) -> int:
    if not attempts:
        return 0
    is_running = not all(attempt.ended for attempt in attempts.values())
    end = len(items) - 1 if is_running else max(attempt.last for attempt in attempts.values())
    return items[end].end_us - items[min(attempt.started for attempt in attempts.values())].start_us


def _failures(attempts: dict[int, _Attempt]) -> dict[str, int]:
    ended = (attempt for attempt in attempts.values() if attempt.ended)
    failed = (each for each in ended if not (each.saved or each.asked or each.cause == _FINISHED))
    return dict(Counter(attempt.cause for attempt in failed))


class _Phase:
    """What the run does, updated event by event."""

    def __init__(self, attempts: dict[int, _Attempt]) -> None:
        self._attempts = attempts
        self._open: _Attempt | None = None
        self._stepped = False
        self._stage = ""
        self._cause = ""  # of the newest attempt's end
        self._restarting, self._over = False, True  # over: no driver is known
        self._pending: set[str] = set()
        self._queued: set[str] = set()  # names of jobs

    def apply(self, item: Item) -> None:
        kind, event, attempt = item.kind, item.event, self._attempts.get(item.attempt)
        self._apply_queue(item)
        if kind == "head_started":
            self._stage, self._restarting, self._over = "", False, False
        elif kind == "run_finished":
            self._stage, self._restarting, self._over = "", False, True
        elif kind.startswith("stage_"):
            self._stage = str(event.get("stage") or "") if kind == "stage_started" else ""
        elif kind == "attempt_started":
            self._cause = (self._open.cause or "unknown") if self._open else self._cause
            self._open, self._stepped, self._restarting, self._over = attempt, False, False, False
        elif kind == STEP and attempt is self._open:
            self._stepped = True
        elif kind == "attempt_ended" and attempt is self._open and attempt:
            self._open, self._cause = None, attempt.cause
            self._restarting = event.get("decision") not in ("stop", "done", "", None)
        elif kind in ("milestone", "eval_started"):
            self._pending.add(str(event.get("milestone_tokens")))
        elif kind == "eval_finished" or (kind == "eval_failed" and event.get("final", True)):
            self._pending.discard(str(event.get("milestone_tokens")))

    def _apply_queue(self, item: Item) -> None:
        kind = item.kind
        if kind == "job_queued":
            self._queued.add(str(item.event["job"]))
        elif kind in ("job_started", "job_left_queue"):
            self._queued.discard(str(item.event["job"]))
        elif kind in ("attempt_started", "attempt_ended") or item.is_train:
            self._queued.discard(TRAIN_JOB)
        elif kind in ("head_started", "run_finished"):
            self._queued &= {TRAIN_JOB}

    def alive(self, index: int) -> bool:
        return self._open is not None and not (self._open.ended and index >= self._open.last)

    def name(self, index: int) -> str:
        if self._waits_in_queue(index):
            return QUEUED
        if self.alive(index):
            return BETWEEN_STEPS if self._stepped else self._restart(self._cause)
        if self._stage:
            return self._stage
        if self._over:
            return IDLE
        if self._open:  # it has died, but its end is not journalled yet
            if self._open.cause != _FINISHED:
                return self._restart(self._open.cause)
            return EVALUATION_WAIT if self._pending else END
        if self._pending and self._cause in _EVALUATED_AFTER:
            return EVALUATION_WAIT
        return self._restart(self._cause) if self._restarting else HEAD

    def _waits_in_queue(self, index: int) -> bool:
        """Return whether the run holds no nodes because its training job waits; other jobs don't matter."""
        if self._open:
            return TRAIN_JOB in self._queued
        return bool(self._queued and not self._over and (self._stage or self._pending))

    @staticmethod
    def _restart(cause: str) -> str:
        return f"{RESTART}{cause}" if cause else START


def _phases(items: Sequence[Item], attempts: dict[int, _Attempt]) -> Iterator[tuple[str, int]]:
    """Yield the category from each item's start to its end, and from there to the next one's start.

    Each comes with the index of its start time, where an item's times are 2 i and 2 i + 1.
    """
    phase = _Phase(attempts)
    for index, (item, after) in enumerate(itertools.zip_longest(items, items[1:])):
        phase.apply(item)
        if item.stop > item.first + 1:
            yield phase.name(index - 1), 2 * index
        if after is not None:
            # A driver that dies writes no event: before the next one starts, the run is idle unless training continues.
            driverless = after.kind == "head_started" and not phase.alive(index)
            yield IDLE if driverless else phase.name(index), 2 * index + 1


def _totals_us(phases: Iterable[tuple[str, int]], times_us: Sequence[int], claims: Claims) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int, claims.totals_us)
    free_us = (times_us - claims.before_us).tolist()
    for category, at in phases:
        totals[category] += free_us[at + 1] - free_us[at]
    return {category: total for category, total in totals.items() if total}


#: Training was up: steps followed one another, including steps that were later redone.
_UP = (PRODUCTIVE, DATA_WAIT, CHECKPOINT_STALL, BETWEEN_STEPS, LOST)
_LABELS = {
    PRODUCTIVE: "productive steps",
    DATA_WAIT: "data wait",
    CHECKPOINT_STALL: "checkpoint stall",
    BETWEEN_STEPS: "between steps",
    LOST: "lost steps (redone)",
    START: "start of training",
    "warm_cache": "cache warm-up",
    END: "end of training",
    EVALUATION_WAIT: "evaluation wait",
    QUEUED: "waiting in the queue",
    HEAD: "driver, between stages",
    IDLE: "idle",
}
#: Categories in which the run holds no nodes. The cost is divided among the others by their time.
_WITHOUT_NODES = (QUEUED, HEAD, IDLE, "validate", "provenance", "data", "report")
#: The last rows; restarts and stages precede them in order of time.
_LAST = (END, EVALUATION_WAIT, QUEUED, HEAD, IDLE)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The interval between checkpoints, and the intervals that would lose the least time.

    Args:
        save_s: mean time that training paused for a checkpoint.
        failures: attempts that ended without a last checkpoint and without a request to stop, by cause.
        mean_time_between_failures_s: uptime per failure; None without a failure.
        least_time_between_failures_s: without a failure, its lower bound with 95 % confidence.
        step_s: median time of the steps that count.
        every_steps: ``checkpoint.every_steps``; ``every_s`` is the time of these steps.
        young_s, daly_s: best interval in seconds of training, from the measured values; None without a failure.
        daly_steps: ``daly_s`` in steps, at least one.
    """

    saves: int
    save_s: float | None
    failures: dict[str, int]
    mean_time_between_failures_s: float | None
    least_time_between_failures_s: float | None
    step_s: float | None
    every_steps: int
    every_s: float | None
    young_s: float | None
    daly_s: float | None
    daly_steps: int | None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """A run's wall time by category, and the figures derived from it.

    Args:
        wall_s: time from the journal's first event to its newest that no person wrote, or to the end of the run.
        seconds: time by category, which adds up to ``wall_s``.
        training_s: time from the first attempt's start to the newest attempt's last event.
        up_s: the part of ``training_s`` in which steps followed one another (``_UP``).
        uptime_fraction: ``up_s / training_s`` (HLAT, arXiv 2404.10630, Table 1: 98.81 % with automatic restarts,
            77.83 % without).
        ettr_fraction: effective training time ratio (arXiv 2410.21680): productive time / ``training_s``.
        accelerators: each process has an accelerator; False on CPUs.
        process_hours: time of all training processes, idle or not, while the run held its nodes.
        cost_usd: cost of the nodes that the run held (``numbers.node_hours``); None without
            ``cluster.price_usd_per_node_hour``.
        recoveries: seconds of each recovery by phase, with ``cause`` and ``warm`` (``events.RECOVERY_PHASES``).
    """

    wall_s: float
    seconds: dict[str, float]
    training_s: float
    up_s: float
    uptime_fraction: float | None
    ettr_fraction: float | None
    accelerators: bool
    process_hours: float
    cost_usd: float | None
    checkpointing: Checkpointing
    recoveries: list[dict[str, Any]] = field(default_factory=list)


def measure_goodput(events: Iterable[Event], config: Config, state: RunState) -> Goodput:
    """Return the goodput of a journal, or of any prefix of it.

    Args:
        events: events in order of time; steps among them are ignored.
    """
    time = account(events, state.steps)
    seconds = {category: time.seconds[category] for category in sorted(time.seconds, key=_rank)}
    up_s = math.fsum(seconds.get(category, 0.0) for category in _UP)
    return Goodput(
        wall_s=time.wall_s,
        seconds=seconds,
        training_s=time.training_s,
        up_s=up_s,
        uptime_fraction=_share(up_s, time.training_s),
        ettr_fraction=_share(seconds.get(PRODUCTIVE, 0.0), time.training_s),
        accelerators=config.backend.device != "cpu",
        process_hours=process_hours(state, config),
        cost_usd=cost_usd(state, config),
        checkpointing=_checkpointing(state, config, time, up_s),
        recoveries=[attempt.recovery for attempt in state.attempts if attempt.recovery],
    )


def _checkpointing(state: RunState, config: Config, time: Account, up_s: float) -> Checkpointing:
    save_s = mean([stall_s for stall_s in time.stalls_s if stall_s >= 0])  # damaged: NaN or negative
    step_s = median(column(state, "step_s"))
    failures = sum(time.failures.values())
    between_s = up_s / failures if failures and up_s > 0 else None
    quiet_s = budget.least_time_between_failures_s(up_s) if not failures and up_s > 0 else None
    young_s = daly_s = None
    if save_s and between_s:
        young_s = budget.young_s(save_s, between_s)
        daly_s = budget.daly_s(save_s, between_s)
    every = config.checkpoint.every_steps
    return Checkpointing(
        saves=len(time.stalls_s),
        save_s=save_s,
        failures=time.failures,
        mean_time_between_failures_s=between_s,
        least_time_between_failures_s=quiet_s,
        step_s=step_s,
        every_steps=every,
        every_s=every * step_s if step_s else None,
        young_s=young_s,
        daly_s=daly_s,
        daly_steps=max(1, round(daly_s / step_s)) if daly_s and step_s else None,
    )


def label(category: str) -> str:
    """Return a category's name for people."""
    if category.startswith(RESTART):
        return f"restart: {category.removeprefix(RESTART)}"
    return _LABELS.get(category, category.replace("_", " "))


def time_table(goodput: Goodput) -> tuple[list[str], list[list[str]]]:
    """Return a header and a row per category with its time, share and cost (if there is a price)."""
    priced = goodput.cost_usd is not None
    held_s = goodput.wall_s - sum(goodput.seconds.get(category, 0.0) for category in _WITHOUT_NODES)
    header = ["category", "time", "share", *(["USD"] if priced else [])]
    rows = []
    for category, seconds in [*goodput.seconds.items(), ("wall time", goodput.wall_s)]:
        share = seconds / goodput.wall_s if goodput.wall_s else 0.0
        cost = [] if goodput.cost_usd is None else [f"{_part(category, seconds, held_s) * goodput.cost_usd:,.2f}"]
        rows.append([label(category), duration(seconds), f"{100 * share:.1f} %", *cost])
    return header, rows


def facts(goodput: Goodput) -> list[tuple[str, str]]:
    """Return the known facts that follow from the categories, as name and text."""
    hours = "accelerator-hours" if goodput.accelerators else "process-hours"
    known = [
        ("goodput (ETTR)", _percent(goodput.ettr_fraction, "productive steps", goodput)),
        ("uptime", _percent(goodput.uptime_fraction, "training was up", goodput)),
        (hours, f"{goodput.process_hours:,.2f}"),
        ("cost", "" if goodput.cost_usd is None else f"{goodput.cost_usd:,.2f} USD"),
        *_recovery_facts(goodput.recoveries),
        *_interval_facts(goodput.checkpointing, goodput.up_s),
    ]
    return [(name, text) for name, text in known if text]


def _recovery_facts(recoveries: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the median parts of all recoveries, and for each cause the median and the 95th percentile of the whole."""
    if not recoveries:
        return []
    parts = {name: median([float(each.get(name) or 0.0) for each in recoveries]) or 0.0 for name in RECOVERY_PHASES}
    wholes: dict[str, list[float]] = defaultdict(list)
    for each in recoveries:
        wholes[str(each.get("cause"))].append(math.fsum(float(each.get(name) or 0.0) for name in RECOVERY_PHASES))
    causes = []
    for cause, seconds in sorted(wholes.items()):
        ordered = sorted(seconds)
        most_s = ordered[math.ceil(0.95 * len(ordered)) - 1]
        causes.append(f"{cause} {duration(median(seconds) or 0.0)} (p95 {duration(most_s)}, {len(seconds)} times)")
    known = [f"{name.removesuffix('_s').replace('_', ' ')} {duration(part)}" for name, part in parts.items() if part]
    return [("recovery, median", "; ".join(causes)), ("recovery parts, median", ", ".join(known))]


def _interval_facts(saving: Checkpointing, up_s: float) -> list[tuple[str, str]]:
    every = f"every {saving.every_steps:,} steps" + (f", {duration(saving.every_s)}" if saving.every_s else "")
    saves = f"{saving.saves:,} checkpoints" if saving.saves != 1 else "1 checkpoint"
    causes = ", ".join(f"{count} {cause}" for cause, count in saving.failures.items())
    failed = f"{causes}, in {duration(up_s)} of training"
    if saving.mean_time_between_failures_s is not None:
        failed += f": one in {duration(saving.mean_time_between_failures_s)}"
    none = f"none in {duration(up_s)} of training"
    if saving.least_time_between_failures_s is not None:
        none += f": with 95 % confidence less than one in {duration(saving.least_time_between_failures_s)}"
    steps = f", {saving.daly_steps:,} step{'s' * (saving.daly_steps > 1)}" if saving.daly_steps else ""
    return [
        ("checkpoint stall", "" if saving.save_s is None else f"{duration(saving.save_s)}, mean of {saves}"),
        ("failures", failed if saving.failures else none),
        ("checkpoint interval", every),
        ("best interval (Young)", "" if saving.young_s is None else f"every {duration(saving.young_s)}"),
        ("best interval (Daly)", "" if saving.daly_s is None else f"every {duration(saving.daly_s)}{steps}"),
    ]


def _rank(category: str) -> int:
    if category in _UP:
        return _UP.index(category) - len(_UP)
    return 1 + _LAST.index(category) if category in _LAST else 0


def _percent(fraction: float | None, what: str, goodput: Goodput) -> str:
    if fraction is None:
        return ""
    return f"{100 * fraction:.1f} % ({what}, of {duration(goodput.training_s)} since the first attempt's start)"


def _share(part_s: float, whole_s: float) -> float | None:
    return part_s / whole_s if whole_s > 0 else None


def _part(category: str, seconds: float, held_s: float) -> float:
    if category in _WITHOUT_NODES or not held_s:
        return 0.0
    return min(1.0, seconds / held_s)


@dataclass(frozen=True)
class Price:
    """The price of ``COMPARED_TOKENS`` tokens; ``of_baseline_fraction`` is None without a baseline."""

    name: str
    usd: float
    of_baseline_fraction: float | None = None


def prices(config: Config, time: Goodput, tokens: int) -> list[Price]:
    """Return the prices of the run, its plan and its baseline, as far as known; empty without a price."""
    if time.cost_usd is None or tokens <= 0:
        return []
    usd = time.cost_usd * COMPARED_TOKENS / tokens
    baseline, step_s = baseline_usd_per_4m_tokens(config), mean_step_s(config)
    found = [Price("this run, with lost time", usd, usd / baseline if baseline else None)]
    planned = planned_cost(config, step_s).usd_per_4m_tokens if step_s else None
    if planned is not None:
        found.append(Price("plan, without failures", planned))
    if baseline is not None:
        found.append(Price(f"baseline: {config.cluster.baseline.name or 'unnamed'}", baseline))
    return found
