"""Selects the steps that MLflow gets, and writes amendments as tags there.

MLflow gets all steps of a run of up to 100,000 steps, and at most as many of a longer one. The selection depends only
on a step's number and on the run's planned length. So a run that is copied while it trains, and one that is copied at
its end, have the same steps in MLflow. The journal has all of them. A parameter in MLflow can't change, so each amended
key has a tag with the sequence of its values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.tracking import FIRST_STEPS, every_steps
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event, no_steps
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.state import AmendmentState

if TYPE_CHECKING:
    from mlflow import MlflowClient


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
        """The number of steps from one to the next."""
        return every_steps(self.total_steps)

    def step(self, step: int) -> bool:
        """Return whether MLflow gets a step."""
        return step <= FIRST_STEPS or step % self.every == 0 or step == self.total_steps

    def line(self, line: bytes) -> bool:
        """Return whether a line of the journal must be read: a step that MLflow gets, or another event."""
        if no_steps(line):
            return True
        number = _STEP.search(line)
        return number is None or self.step(int(number[1]))


_PREFIX = "hlatctl.amended."
_KINDS = ("config_amended", "amendment_applied")
#: MLflow accepts tags of up to 8,000 bytes.
_MAX_CHARS = 2000


def copy_amendments(client: MlflowClient, mlflow_run_id: str, run: RunPaths, new: list[Event]) -> None:
    """Set the tags from the whole journal, if one of the new events changes them."""
    if not any(event["kind"] in _KINDS for event in new):
        return
    for key, course in courses(read_state(run).amendments).items():
        client.set_tag(mlflow_run_id, f"{_PREFIX}{key}", hide(course)[-_MAX_CHARS:])


def courses(amendments: list[AmendmentState]) -> dict[str, str]:
    """Return the values of each amended key in order: ``0.0003; from step 1201: 0.0001; pending: 5e-05``."""
    texts: dict[str, str] = {}
    for amendment in amendments:
        begins = "pending" if amendment.applied_step is None else f"from step {amendment.applied_step + 1}"
        for key, (old, new) in amendment.changes.items():
            texts[key] = f"{texts.get(key, old)}; {begins}: {new}"
    return texts
