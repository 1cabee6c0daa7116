"""Progress of an evaluation: its task, the answered requests, and the time left for the task."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hlatctl.cli.progress import LiveObserver, PlainObserver
from hlatctl.cli.summary import evaluation_line
from hlatctl.run.simulated import leading

if TYPE_CHECKING:
    from conf.schema import Config
    from hlatctl.run.state import MilestoneState, RunState

#: Least time between two lines of one task.
_PLAIN_EVERY_S = 10.0


class LiveEvaluationObserver(LiveObserver):
    """Redraws one line, with a bar for the requests of the task."""

    def update(self, state: RunState, config: Config) -> None:
        """Redraw."""
        milestone = _under_way(state)
        if milestone is None or milestone.progress is None:
            self._progress.update(self._task, total=None, description="preparing")
            return
        done, total = milestone.progress.done, milestone.progress.total
        self._progress.update(self._task, total=total or None, completed=done, description=_line(milestone, state))


class PlainEvaluationObserver(PlainObserver):
    """Prints every message and the start of every task, and otherwise at most one line in ten seconds."""

    _shown_task = _shown_line = ""

    def update(self, state: RunState, config: Config) -> None:
        """Print a line if it differs from the last one and is due."""
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
    """Return the running evaluation that was updated last."""
    running = [(m.progress.updated_unix_s, m) for m in state.milestones.values() if m.progress]
    return max(running, key=lambda pair: pair[0], default=(0.0, None))[1]
