"""Which steps MLflow gets: all of a run of up to 100,000 steps, and at most as many of a longer one.

A copy depends only on a step's number and on the run's planned length. So a run that is copied while it trains, and one
that is copied at its end, have the same steps in MLflow. The journal has all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from conf.mlflow_steps import FIRST_STEPS, every_steps
from hlatctl.run.journal import Event, JournalTail, no_steps
from hlatctl.run.paths import RunPaths

_STEP = re.compile(rb'"step": ?(\d+)')


@dataclass(frozen=True)
class Shown:
    """The steps that MLflow gets.

    Args:
        total_steps: the run's planned length.
    """

    total_steps: int

    @property
    def every(self) -> int:
        """Steps from one to the next."""
        return every_steps(self.total_steps)

    def step(self, step: int) -> bool:
        """Return whether MLflow gets a step."""
        return step <= FIRST_STEPS or step % self.every == 0 or step == self.total_steps

    def line(self, line: bytes) -> bool:
        """Return whether a line of the journal has to be read: a step that MLflow gets, or another event."""
        if no_steps(line):
            return True
        number = _STEP.search(line)
        return number is None or self.step(int(number[1]))


class Counted:
    """Which steps count in the end, according to the starts of later attempts. Reads the journal without parsing steps.

    Args:
        run: the run directory.
        offsets: bytes of the journal that have been copied.
    """

    def __init__(self, run: RunPaths, offsets: Mapping[str, int]) -> None:
        tail = JournalTail(run, dict(offsets), wanted=lambda line: b'"train_started"' in line)
        self._starts = [
            (int(event["attempt"]), int(event.get("resumed_from_step") or 0))
            for event in tail.stream()
            if event["kind"] == "train_started"
        ]
        self._last: dict[int, float] = {}

    def __call__(self, event: Event) -> bool:
        """Return whether no later attempt starts before this step."""
        attempt = int(event["attempt"])
        if attempt not in self._last:
            later = (resumed for number, resumed in self._starts if number > attempt)
            self._last[attempt] = min(later, default=math.inf)
        return bool(event["step"] <= self._last[attempt])
