"""How far evaluation is behind training, and when it catches up; pure.

``evaluation_queue`` has the milestones that wait and a forecast from measured times; ``task_forecast`` has the times of
the tasks of one evaluation. The same in words is for `status`, the live page and the alarm.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import Config
from hlatctl.plan.pace import seconds_per_step, training_left_s
from hlatctl.run.pace import median_s, task_left_s
from hlatctl.run.state import MilestoneState, RunState
from hlatctl.units import count, counted, duration, utc

#: A forecast uses the median of this many newest evaluations.
_NEWEST = 5


@dataclass(frozen=True, kw_only=True)
class EvaluationQueue:
    """The milestones that are not evaluated, and a forecast. Times are None while they are unknown.

    Args:
        waiting, running: tokens of the waiting milestones, and of those being evaluated.
        tokens_behind: tokens trained since the earliest of them; 0 if there is none.
        oldest_waiting_since_unix_s: when the checkpoint of the longest-waiting milestone was complete.
        evaluation_s: median time of the newest evaluations, including the export.
        interval_s: time that training takes between two milestones at its current pace; None if no milestone is left.
        ratio: ``evaluation_s`` per simultaneous evaluation, over ``interval_s``. Above 1,
            evaluation falls behind while training continues.
        caught_up_s: time until no milestone waits; 0 if none does.
        all_evaluated_s: time until the last milestone of the run is evaluated.
        after_training_s: the part of ``all_evaluated_s`` after training ends.
    """

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    tokens_behind: int
    oldest_waiting_since_unix_s: float | None
    evaluation_s: float | None
    interval_s: float | None
    ratio: float | None
    caught_up_s: float | None
    all_evaluated_s: float | None
    after_training_s: float | None


@dataclass(frozen=True, kw_only=True)
class TaskForecast:
    """One task of an evaluation: its usual time, and what is left of it. None: unknown."""

    task: str
    wall_s: float | None
    left_s: float | None


def evaluation_queue(state: RunState, config: Config, now_unix_s: float) -> EvaluationQueue:
    """Return the queue of a run that trains now.

    The forecast assumes the current pace of training and the median time of an evaluation. Its cost grows with the
    milestones that are left, of which a run has at most 1,000.
    """
    own = [state.milestones[tokens] for tokens in sorted(config.milestones.values()) if tokens in state.milestones]
    waiting = [milestone for milestone in own if milestone.waits]
    running = [milestone for milestone in own if milestone.status != "evaluated" and _is_taken(milestone)]
    behind = min((milestone.milestone_tokens for milestone in (*waiting, *running)), default=state.tokens)
    one_s, arrivals_s = evaluation_s(state), _arrivals_s(state, config)
    interval_s = _interval_s(state, config)
    times_s = None
    if one_s is not None and arrivals_s is not None:
        begun_s = [now_unix_s - (milestone.taken_unix_s or now_unix_s) for milestone in running]
        times_s = _forecast(one_s, config.eval.concurrent, begun_s, len(waiting), arrivals_s)
    training_s = arrivals_s[-1] if arrivals_s else 0.0
    return EvaluationQueue(
        waiting=tuple(milestone.milestone_tokens for milestone in waiting),
        running=tuple(milestone.milestone_tokens for milestone in running),
        tokens_behind=max(0, state.tokens - behind),
        oldest_waiting_since_unix_s=min((milestone.due_unix_s for milestone in waiting), default=None),
        evaluation_s=one_s,
        interval_s=interval_s,
        ratio=one_s / config.eval.concurrent / interval_s if one_s and interval_s else None,
        caught_up_s=None if times_s is None else times_s[0],
        all_evaluated_s=None if times_s is None else times_s[1],
        after_training_s=None if times_s is None else max(0.0, times_s[1] - training_s),
    )


def evaluation_s(state: RunState) -> float | None:
    """Return the median time of the newest evaluations under the run's first contract; None before the first."""
    return median_s(_newest([milestone.wall_s for milestone in _evaluated(state)]))


def task_forecast(state: RunState, running: MilestoneState | None = None) -> list[TaskForecast]:
    """Return the tasks of the running evaluation, or else of the next one, in order.

    The usual time of a task is the median of the newest evaluations that did it in one go.
    """
    evaluated, progress = _evaluated(state), running.progress if running else None
    tasks = progress.tasks if progress else next((list(m.task_wall_s) for m in reversed(evaluated)), [])
    usual = {task: median_s(_newest([m.task_wall_s.get(task) for m in evaluated])) for task in tasks}
    if progress is None:
        return [TaskForecast(task=task, wall_s=usual[task], left_s=usual[task]) for task in tasks]
    at = tasks.index(progress.task) if progress.task in tasks else -1
    left_s: dict[str, float | None] = {task: 0.0 if tasks.index(task) < at else usual[task] for task in tasks}
    if at >= 0:
        rest_s, spent_s = task_left_s(progress), progress.updated_unix_s - progress.began_unix_s
        usual_s = usual[progress.task]
        left_s[progress.task] = rest_s if rest_s is not None else usual_s and max(0.0, usual_s - spent_s)
        if progress.task in progress.task_wall_s:
            left_s[progress.task] = 0.0
    return [TaskForecast(task=task, wall_s=usual[task], left_s=left_s[task]) for task in tasks]


def left_s(tasks: Sequence[TaskForecast]) -> float | None:
    """Return the time left of all tasks together; None if one's is unknown."""
    known = [task.left_s for task in tasks if task.left_s is not None]
    return sum(known) if tasks and len(known) == len(tasks) else None


def _evaluated(state: RunState) -> list[MilestoneState]:
    return [milestone for _, milestone in sorted(state.milestones.items()) if milestone.status == "evaluated"]


def _newest(times_s: Sequence[float | None]) -> list[float]:
    return [time_s for time_s in times_s if time_s is not None][-_NEWEST:]


def _is_taken(milestone: MilestoneState) -> bool:
    return milestone.taken_unix_s is not None or milestone.progress is not None


def _left_steps(state: RunState, config: Config) -> list[int]:
    return [step for step in sorted(config.milestones) if step > state.step]


def _arrivals_s(state: RunState, config: Config) -> list[float] | None:
    """Return the times from now until each later milestone; None without a pace.

    If training waits for evaluations, no milestone arrives while one is waiting.
    """
    steps = _left_steps(state, config)
    if not steps or config.eval_placement == "between":
        return []
    arrivals_s = [training_left_s(state, config, step) for step in steps]
    known = [arrival_s for arrival_s in arrivals_s if arrival_s is not None]
    return known if len(known) == len(steps) else None


def _interval_s(state: RunState, config: Config) -> float | None:
    steps, pace_s = _left_steps(state, config), seconds_per_step(state, config)
    return pace_s * config.eval.every_tokens / config.during(state.step).tokens_per_step if steps and pace_s else None


def _forecast(
    one_s: float, concurrent: int, begun_s: Sequence[float], waiting: int, arrivals_s: Sequence[float]
) -> tuple[float, float]:
    """Return the time until no milestone waits, and the time until the last one is evaluated.

    One takes ``one_s``; ``begun_s`` is how long each has run, and ``arrivals_s`` when the later milestones come.
    """
    free_s = [max(0.0, one_s - spent_s) for spent_s in begun_s]
    free_s += [0.0] * (concurrent - len(free_s))
    heapq.heapify(free_s)
    starts: list[tuple[float, float]] = []
    for arrival_s in (*[0.0] * waiting, *arrivals_s):
        start_s = max(arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + one_s)
        starts.append((arrival_s, start_s))
    caught_up_s = 0.0
    for arrival_s, start_s in starts:  # in order: the first moment that nothing waits
        if arrival_s > caught_up_s:
            break
        caught_up_s = max(caught_up_s, start_s)
    return caught_up_s, max(free_s)


#: Tasks that a line names; the others are one sum.
_NAMED_TASKS = 4


def waiting_text(queue: EvaluationQueue) -> str:
    """Return how many milestones wait, since when, and how far behind training they are."""
    oldest = queue.oldest_waiting_since_unix_s
    since = f", the oldest since {utc(oldest)}" if oldest else ""
    return f"{counted(len(queue.waiting), 'milestone')}{since}; {count(queue.tokens_behind)} tokens behind training"


def forecast_text(queue: EvaluationQueue) -> str:
    """Return how fast evaluation is compared with training, and when it catches up; empty if neither is known."""
    if queue.evaluation_s is None:
        return ""
    parts = [f"{duration(queue.evaluation_s)} a milestone"]
    if queue.interval_s and queue.ratio:
        parts.append(f"{queue.ratio:.2g} times the {duration(queue.interval_s)} between two")
    if queue.waiting and queue.caught_up_s is not None:
        parts.append(f"caught up in {duration(queue.caught_up_s)}")
    if queue.after_training_s and queue.interval_s:
        parts.append(f"the last one ends {duration(queue.after_training_s)} after training")
    return ", ".join(parts)


def tasks_text(tasks: Sequence[TaskForecast]) -> str:
    """Return the time left of an evaluation and its longest tasks; empty if no time is known."""
    known = sorted((task for task in tasks if task.left_s), key=lambda task: -(task.left_s or 0.0))
    if not known:
        return ""
    named, others = known[:_NAMED_TASKS], known[_NAMED_TASKS:]
    parts = [f"{task.task} {duration(task.left_s or 0.0)}" for task in named]
    if others:
        others_s = sum(task.left_s or 0.0 for task in others)
        parts.append(f"{counted(len(others), 'other task')} {duration(others_s)}")
    whole_s, unknown = left_s(tasks), sum(task.left_s is None for task in tasks)
    rest = f"; {counted(unknown, 'task')} of unknown time" if unknown else ""
    return f"{duration(whole_s)} left: {', '.join(parts)}" if whole_s is not None else f"{', '.join(parts)}{rest}"


def behind_text(queue: EvaluationQueue) -> str:
    """Return the message of an alarm: how many milestones wait, and whether evaluation is slower than training."""
    waits = f"{counted(len(queue.waiting), 'milestone')} wait for evaluation"
    if queue.ratio is None or queue.evaluation_s is None or queue.interval_s is None:
        return f"{waits}; how long one takes is unknown until the first is evaluated"
    pace = (
        f"one takes {duration(queue.evaluation_s)}, {queue.ratio:.2g} times the {duration(queue.interval_s)} "
        "between two milestones"
    )
    if queue.ratio <= 1:
        return f"{waits}: {pace}; caught up in {duration(queue.caught_up_s or 0.0)}"
    after = f", and ends {duration(queue.after_training_s)} after training" if queue.after_training_s else ""
    return f"{waits}: {pace}, so evaluation falls behind until training ends{after}"
