"""Progress of training and of evaluation: a line that is redrawn on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from hlatctl.cli.status import evaluation_line
from hlatctl.plan.pace import seconds_per_step, training_left_s
from hlatctl.run.labels import leading
from hlatctl.units import count, duration, number, one_line, printable, queued

if TYPE_CHECKING:
    from rich.progress import Progress

    from conf.schema import Config
    from flows.runtime.driver import Observer
    from hlatctl.run.state import MilestoneState, RunState


#: Minimum time between two plain lines. Each tenth of the run gets a line regardless.
_PLAIN_EVERY_S = 10.0


@contextmanager
def observer_for(
    stream: TextIO, *, live: type[LiveObserver] | None = None, plain: type[PlainObserver] | None = None
) -> Iterator[Observer]:
    """Yield an observer for a stream: one line that is redrawn on a terminal, plain lines elsewhere."""
    if not stream.isatty():
        yield (plain or PlainObserver)(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    progress = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        console=Console(file=stream),
        transient=True,
        redirect_stdout=False,
    )
    with progress:
        yield (live or LiveObserver)(progress)


class LiveObserver:
    """Redraws one line. Messages scroll above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def update(self, state: RunState, config: Config) -> None:
        """Redraw."""
        total = config.total_steps if state.steps else None
        self._progress.update(self._task, total=total, completed=state.step, description=describe(state, config))

    def message(self, text: str) -> None:
        """Print above the line."""
        self._progress.console.print(printable(text), markup=False, highlight=False)


class PlainObserver:
    """Prints every message and every tenth of the run, and otherwise at most one line in ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_step = 0
        self._shown_s = float("-inf")

    def update(self, state: RunState, config: Config) -> None:
        """Print a line if there is a new step and a line is due."""
        if state.step == self._shown_step:
            return
        tenth = 10 * state.step // config.total_steps > 10 * self._shown_step // config.total_steps
        if tenth or time.monotonic() - self._shown_s >= _PLAIN_EVERY_S:
            self._shown_step, self._shown_s = state.step, time.monotonic()
            self.message(describe(state, config))

    def message(self, text: str) -> None:
        """Print."""
        print(printable(text), file=self._stream, flush=True)


def describe(state: RunState, config: Config) -> str:
    """Return a run's state in one line."""
    return leading(one_line(_where(state, config)), simulated=state.simulated)


def _where(state: RunState, config: Config) -> str:
    stages, last, attempt = state.running_stages, state.last_step, state.attempt
    if waits := [f"{name} {queued(job.reason, None)}" for name, job in state.queued.items()]:
        return ", ".join([*stages, *waits])
    if stages:
        return ", ".join(stages)
    if last is None:
        return f"training, attempt {attempt.number}: no step yet" if attempt else "starting"
    parts = [
        f"step {state.step}/{config.total_steps}",
        *([f"stage {stage.name}"] if (stage := config.stage_at(state.step)) else []),
        f"{count(state.tokens)} tokens",
        f"loss {number(last, 'loss'):.3f}",
        *_pace(state, config),
        *_milestones(state, config),
    ]
    return " · ".join(parts)


def _pace(state: RunState, config: Config) -> list[str]:
    pace_s = seconds_per_step(state, config)
    if not pace_s:
        return []
    left_s = training_left_s(state, config)
    return [
        f"{count(config.during(state.step).tokens_per_step / pace_s)} tok/s",
        *([f"{duration(left_s)} left"] if left_s else []),
    ]


def _milestones(state: RunState, config: Config) -> list[str]:
    running = [milestone for milestone in state.milestones.values() if milestone.status == "running"]
    if running:
        return [f"evaluating {count(running[0].milestone_tokens)}"]
    coming = [tokens for step, tokens in config.milestones.items() if step > state.step]
    return [f"milestone at {count(min(coming))}"] if coming else []


class LiveEvaluationObserver(LiveObserver):
    """Redraws one line, with a bar for the requests of the task."""

    def update(self, state: RunState, config: Config) -> None:
        """Redraw."""
        milestone = _under_way(state)
        if milestone is None or milestone.progress is None:
            self._progress.update(self._task, total=None, description="preparing")
            return
        done, total = milestone.progress.done, milestone.progress.total
        self._progress.update(
            self._task, total=total or None, completed=done, description=_evaluation(milestone, state)
        )


class PlainEvaluationObserver(PlainObserver):
    """Prints every message and the start of every task, and otherwise at most one line in ten seconds."""

    _shown_task = _shown_line = ""

    def update(self, state: RunState, config: Config) -> None:
        """Print a line if it differs from the last one and is due."""
        milestone = _under_way(state)
        if milestone is None or milestone.progress is None or not milestone.progress.task:
            return
        line, now_s = _evaluation(milestone, state), time.monotonic()
        is_time = milestone.progress.task != self._shown_task or now_s - self._shown_s >= _PLAIN_EVERY_S
        if is_time and line != self._shown_line:
            self._shown_task, self._shown_line, self._shown_s = milestone.progress.task, line, now_s
            self.message(line)


def _evaluation(milestone: MilestoneState, state: RunState) -> str:
    return leading(evaluation_line(milestone), simulated=state.simulated)


def _under_way(state: RunState) -> MilestoneState | None:
    running = [(m.progress.updated_unix_s, m) for m in state.milestones.values() if m.progress]
    return max(running, key=lambda pair: pair[0], default=(0.0, None))[1]
