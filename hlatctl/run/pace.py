"""Pace of a run or an evaluation, from recent measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

from hlatctl.run.journal import Event
from hlatctl.run.state import EvaluationProgress, RunState
from hlatctl.units import number

#: The recent step time is the median of this many steps.
_NEWEST_STEPS = 20
#: First steps of an attempt, which are not counted: they compile, allocate and fill caches.
_FIRST_STEPS = 2
#: Minimum number of measurements for a pace.
LEAST = 2


def measured_steps(state: RunState) -> Iterator[Event]:
    """Yield the newest steps without the first ones of each attempt; `hlatctl.plan.pace` has their pace."""
    began = {attempt.number: attempt.resumed_from_step or 0 for attempt in state.attempts}
    return (event for event in newest_steps(state) if not _is_first(event, began))


def newest_steps(state: RunState) -> Iterator[Event]:
    """Yield the newest 20 step events, newest first; the cost does not grow with the run."""
    return state.steps.last(_NEWEST_STEPS)


def median_step_s(steps: Iterable[Event], *, least: int = 1) -> float | None:
    """Return the median ``step_s`` of the events that have a finite, positive one; None if fewer than ``least`` do."""
    return median_s((number(event, "step_s") for event in steps), least=least)


def median_s(seconds: Iterable[float], *, least: int = 1) -> float | None:
    """Return the median of the finite, positive times; None if fewer than ``least`` are."""
    times_s = [time_s for time_s in seconds if math.isfinite(time_s) and time_s > 0]
    return statistics.median(times_s) if len(times_s) >= least else None


def task_left_s(progress: EvaluationProgress) -> float | None:
    """Return the time for the remaining requests of an evaluation's task. None if unknown.

    The pace counts from this evaluator's first answer, because the time before includes loading the model.
    """
    if not progress.total or len(progress.counted) < LEAST:
        return None
    (since_s, since), (now_s, now) = progress.counted[0], progress.counted[-1]
    if now <= since or now_s <= since_s:
        return None
    return (now_s - since_s) / (now - since) * (progress.total - now)


def _is_first(event: Event, began: dict[int, int]) -> bool:
    return int(event["step"]) <= began.get(int(event["attempt"]), 0) + _FIRST_STEPS
