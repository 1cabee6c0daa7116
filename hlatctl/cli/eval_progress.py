"""What a person sees of an evaluation while it goes on: task, requests answered, and how long the task will take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hlatctl.cli.progress import LiveObserver, PlainObserver
from hlatctl.cli.summary import evaluation_line
from hlatctl.run.simulated import leading

if TYPE_CHECKING:
    from conf.schema import Config
    from hlatctl.run.state import MilestoneState, RunState

#: Between two plain lines of one task.
_PLAIN_EVERY_S = 10.0


class LiveEvaluationObserver(LiveObserver):
    """One line that is redrawn, with a bar over the requests of the task."""

    def update(self, state: RunState, config: Config) -> None:
        """Redraw."""
        milestone = _under_way(state)
        if milestone is None or milestone.progress is None:
            self._progress.update(self._task, total=None, description="preparing")
            return
        done, total = milestone.progress.done, milestone.progress.total
        self._progress.update(self._task, total=total or None, completed=done, description=_line(milestone, state))


class PlainEvaluationObserver(PlainObserver):
    """A line for every message and every task, and otherwise for what is new, at most one in ten seconds."""

    _shown_task = _shown_line = ""

    def update(self, state: RunState, config: Config) -> None:
        """Print if there is something new and it is time."""
        milestone = _under_way(state)
        if milestone is None or milestone.progress is None or not milestone.progress.task:
            return
        line, now_s = _line(milestone, state), time.monotonic()
        is_time = milestone.progress.task != self._shown_task or now_s - self._shown_s >= _PLAIN_EVERY_S
        if is_time and line != self._shown_line:
            self._shown_task, self._shown_line, self._shown_s = milestone.progress.task, line, now_s
            self.message(line)


def _line(milestone: MilestoneState, state: RunState) -> str:
    return leading(evaluation_line(milestone), simulated=state.simulated)


def _under_way(state: RunState) -> MilestoneState | None:
    """The evaluation that told of itself last."""
    busy = [milestone for milestone in state.milestones.values() if milestone.progress]
    return max(busy, key=lambda found: found.progress.updated_unix_s if found.progress else 0.0, default=None)
