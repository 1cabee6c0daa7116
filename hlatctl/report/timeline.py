"""Assign a run's wall time to categories, from its journal; every microsecond belongs to one category. Pure.

*Phases* are what the run did between two events. *Claims* are the times that the trainer measured: its steps and its
checkpoint stalls. Claims never overlap, and they have priority over phases. ``goodput`` interprets the categories.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlatctl.report.measured import length_us, made, stalls_us, typical_us, us
from hlatctl.run.fold import fold
from hlatctl.run.journal import TRAIN_WRITER, Event, number
from hlatctl.run.state import TRAIN_JOB
from hlatctl.run.steps import StepSeries

PRODUCTIVE, DATA_WAIT, CHECKPOINT_STALL = "productive", "data_wait", "checkpoint_stall"
BETWEEN_STEPS, LOST, START, RESTART = "between_steps", "lost", "start", "restart:"
COMPILE, END, EVALUATION_WAIT, HEAD, IDLE = "compile", "end", "evaluation_wait", "head", "idle"
QUEUED = "queued"
_FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Seconds by category, and the failures.

    Args:
        seconds: they add up to ``wall_s`` to the microsecond. Categories are the constants above, ``restart:CAUSE``
            and the names of stages.
        training_s: from the first attempt's start to the newest attempt's last event.
        failures: attempts that ended without a last checkpoint and without a request to stop, by cause.
    """

    seconds: dict[str, float]
    wall_s: float
    training_s: float
    failures: dict[str, int]


@dataclass
class _Attempt:
    """An attempt in the whole journal: the indices of its start and of its trainer's last event, and how it ended."""

    started: int
    last: int
    ended: bool = False
    cause: str = ""
    saved: bool = False
    asked: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class _Span:
    start_us: int
    end_us: int
    category: str


def account(events: Sequence[Event], steps: StepSeries | None = None) -> Account:
    """Return the account of a journal's events, or of any prefix of them, in order of time.

    Args:
        events: the events.
        steps: those of their steps that count; None: fold the events.
    """
    steps = fold(events).steps if steps is None else steps
    events = _without_afterlife([event for event in events if math.isfinite(event["time_unix_s"])])
    if not events:
        return Account(seconds={}, wall_s=0.0, training_s=0.0, failures={})
    # The clocks of writers differ; make the times monotonic.
    times_us = list(itertools.accumulate((round(event["time_unix_s"] * 1e6) for event in events), max))
    attempts = _attempts(events)
    totals_us = _totals_us(_phases(events, times_us, attempts), list(_claims(events, times_us, attempts, steps)))
    return Account(
        seconds={category: total / 1e6 for category, total in totals_us.items()},
        wall_s=(times_us[-1] - times_us[0]) / 1e6,
        training_s=_training_us(times_us, attempts) / 1e6,
        failures=_failures(attempts),
    )


def _without_afterlife(events: list[Event]) -> list[Event]:
    """Return the events without those after a finished run's end, such as later evaluations, which hold no nodes."""
    end = None
    for index, event in enumerate(events):
        if event["kind"] == "run_finished" and event.get("outcome") == _FINISHED:
            end = index + 1
        elif event["kind"] in ("head_started", "attempt_started"):
            end = None
    return events[:end]


def _attempts(events: Sequence[Event]) -> dict[int, _Attempt]:
    """Return every attempt by its number."""
    attempts: dict[int, _Attempt] = {}
    for index, event in enumerate(events):
        kind, attempt = event["kind"], attempts.get(event["attempt"])
        if kind == "attempt_started":
            attempts.setdefault(event["attempt"], _Attempt(started=index, last=index))
        elif kind == "stop_requested":
            for open_attempt in attempts.values():
                open_attempt.asked |= not open_attempt.ended
        elif attempt is None or attempt.ended:
            continue  # before the first attempt, or a late event of an ended one
        elif kind == "attempt_ended":
            attempt.ended, attempt.cause = True, str(event.get("cause") or "unknown")
        elif str(event.get("writer", "")).startswith("train-"):
            attempt.last = index
            attempt.saved |= kind == "train_stopped" and event.get("reason") in (_FINISHED, "stop")
            attempt.compiled |= kind == "compile_cache" and number(event, "misses") > 0
    return attempts


def _training_us(times_us: Sequence[int], attempts: dict[int, _Attempt]) -> int:
    if not attempts:
        return 0
    is_running = not all(attempt.ended for attempt in attempts.values())
    end = len(times_us) - 1 if is_running else max(attempt.last for attempt in attempts.values())
    return times_us[end] - times_us[min(attempt.started for attempt in attempts.values())]


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

    def apply(self, event: Event) -> None:
        """Apply the next event."""
        kind, attempt = event["kind"], self._attempts.get(event["attempt"])
        self._apply_queue(kind, event)
        if kind == "head_started":
            self._stage, self._restarting, self._over = "", False, False
        elif kind == "run_finished":
            self._stage, self._restarting, self._over = "", False, True
        elif kind.startswith("stage_"):
            self._stage = str(event.get("stage") or "") if kind == "stage_started" else ""
        elif kind == "attempt_started":
            self._cause = (self._open.cause or "unknown") if self._open else self._cause
            self._open, self._stepped, self._restarting, self._over = attempt, False, False, False
        elif kind == "step" and attempt is self._open:
            self._stepped = True
        elif kind == "attempt_ended" and attempt is self._open and attempt:
            self._open, self._cause = None, attempt.cause
            self._restarting = event.get("decision") not in ("stop", "done", "", None)
        elif kind in ("milestone", "eval_started"):
            self._pending.add(str(event.get("milestone_tokens")))
        elif kind == "eval_finished" or (kind == "eval_failed" and event.get("final", True)):
            self._pending.discard(str(event.get("milestone_tokens")))

    def _apply_queue(self, kind: str, event: Event) -> None:
        if kind == "job_queued":
            self._queued.add(str(event["job"]))
        elif kind in ("job_started", "job_left_queue"):
            self._queued.discard(str(event["job"]))
        elif kind in ("attempt_started", "attempt_ended") or str(event.get("writer", "")).startswith(TRAIN_WRITER):
            self._queued.discard(TRAIN_JOB)
        elif kind in ("head_started", "run_finished"):
            self._queued &= {TRAIN_JOB}

    def alive(self, index: int) -> bool:
        """Return whether the open attempt's trainer writes events after this one."""
        return self._open is not None and not (self._open.ended and index >= self._open.last)

    def name(self, index: int) -> str:
        """Return the category of the time after this event."""
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
        if self._restarting:
            return self._restart(self._cause)
        return EVALUATION_WAIT if self._cause == _FINISHED and self._pending else HEAD

    def _waits_in_queue(self, index: int) -> bool:
        """Return whether the run holds no nodes because its job waits; jobs beside training don't matter."""
        if self._open:
            return TRAIN_JOB in self._queued
        return bool(self._queued and not self._over and (self._stage or self._pending))

    @staticmethod
    def _restart(cause: str) -> str:
        return f"{RESTART}{cause}" if cause else START


def _phases(events: Sequence[Event], times_us: Sequence[int], attempts: dict[int, _Attempt]) -> Iterator[_Span]:
    """Yield the times between consecutive events."""
    phase = _Phase(attempts)
    for index, (event, after) in enumerate(itertools.pairwise(events)):
        phase.apply(event)
        # A driver that dies writes no event: before the next one starts, the run is idle unless training continues.
        driverless = after["kind"] == "head_started" and not phase.alive(index)
        yield _Span(times_us[index], times_us[index + 1], IDLE if driverless else phase.name(index))


def _claims(
    events: Sequence[Event], times_us: Sequence[int], attempts: dict[int, _Attempt], counting: StepSeries
) -> Iterator[_Span]:
    """Yield the times of steps and checkpoint stalls, in order and without overlap."""
    counted = set(zip(*counting.columns("attempt", "seq"), strict=True))
    steps, stalls = _steps(events, attempts), stalls_us(events)
    typical = typical_us(events, steps)
    cursor_us, seen = times_us[0], set()
    for index, after in itertools.zip_longest(steps, steps[1:]):
        event, end_us = events[index], times_us[index]
        attempt = event["attempt"]
        cursor_us = max(cursor_us, times_us[attempts[attempt].started])
        measured_us = length_us(event)
        # An attempt's first step loads or compiles graphs; the time beyond the median step isn't training.
        own_us = measured_us if attempt in seen else min(measured_us, typical.get(attempt, measured_us))
        seen.add(attempt)
        start_us = max(cursor_us, end_us - own_us)
        if attempts[attempt].compiled and own_us < measured_us:
            yield _Span(max(cursor_us, end_us - measured_us), start_us, COMPILE)
        yield from _step_spans(event, start_us, end_us, counts=(attempt, event["seq"]) in counted)
        # The stall follows the step, even if the checkpoint was written later.
        free_until_us = times_us[attempts[attempt].last]
        if after is not None:
            next_us = length_us(events[after]) if events[after]["attempt"] == attempt else 0
            free_until_us = min(free_until_us, times_us[after] - next_us)
        stalled_until_us = min(end_us + stalls.get((attempt, number(event, "step")), 0), free_until_us)
        cursor_us = max(end_us, stalled_until_us)
        yield _Span(end_us, cursor_us, CHECKPOINT_STALL)


def _step_spans(event: Event, start_us: int, end_us: int, *, counts: bool) -> Iterator[_Span]:
    if not counts:
        yield _Span(start_us, end_us, LOST)
        return
    waited_until_us = min(end_us, start_us + made(event) * us(event, "data_wait_s"))
    yield _Span(start_us, waited_until_us, DATA_WAIT)
    yield _Span(waited_until_us, end_us, PRODUCTIVE)


def _steps(events: Sequence[Event], attempts: dict[int, _Attempt]) -> list[int]:
    """Return the indices of attempts' steps, without late events."""
    return [
        index
        for index, event in enumerate(events)
        if event["kind"] == "step"
        and (attempt := attempts.get(event["attempt"]))
        and attempt.started < index <= attempt.last
    ]


def _totals_us(phases: Iterator[_Span], claims: Sequence[_Span]) -> dict[str, int]:
    """Return microseconds by category; claims have priority over phases."""
    starts_us = [claim.start_us for claim in claims]
    claimed_us = list(itertools.accumulate((claim.end_us - claim.start_us for claim in claims), initial=0))

    def claimed_before_us(time_us: int) -> int:
        index = bisect.bisect_right(starts_us, time_us)
        over_us = max(0, claims[index - 1].end_us - time_us) if index else 0
        return claimed_us[index] - over_us

    totals: dict[str, int] = defaultdict(int)
    for claim in claims:
        totals[claim.category] += claim.end_us - claim.start_us
    for phase in phases:
        covered_us = claimed_before_us(phase.end_us) - claimed_before_us(phase.start_us)
        totals[phase.category] += phase.end_us - phase.start_us - covered_us
    return {category: total for category, total in totals.items() if total}
