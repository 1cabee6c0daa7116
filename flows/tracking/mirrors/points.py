"""The data of ``step`` and ``eval_finished`` events that mirrors get. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hlatctl.run.evaluations import headlines
from hlatctl.run.journal import Event
from hlatctl.run.step_metrics import MOST_OTHERS, STEP_METRICS, others
from hlatctl.units import number

#: Tokens/s/device follow from tokens/s.
_FIELDS = tuple(metric.name for metric in STEP_METRICS if metric.mirrored)


@dataclass(frozen=True)
class Point:
    """A training step.

    Args:
        step: the optimizer step.
        tokens: tokens consumed up to it.
        time_unix_s: time of its end.
        values: known values by field of its event.
    """

    step: int
    tokens: int
    time_unix_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Scores:
    """The scores of one evaluation of a milestone.

    Args:
        step, tokens: step and tokens of the milestone.
        time_unix_s: time of the evaluation.
        group: ``eval``, or ``eval_contract_<id>`` under another contract than the run's, which isn't comparable.
        values: scores by task.
        grows: later evaluations add tasks to these scores.
    """

    step: int
    tokens: int
    time_unix_s: float
    group: str
    values: Mapping[str, float]
    grows: bool = False

    @property
    def key(self) -> str:
        """A key that identifies the evaluation among those of its run."""
        return f"{self.tokens} {self.group}" + (f" {len(self.values)}" if self.grows else "")


def point(event: Event, shift_s: float) -> Point:
    """Return the data of a ``step`` event that mirrors get. The shift is added to its time."""
    names = (*_FIELDS, *others(event)[:MOST_OTHERS])
    values = {name: float(event[name]) for name in names if event.get(name) is not None}
    return Point(int(event["step"]), int(event.get("tokens") or 0), event["time_unix_s"] + shift_s, values)


def chances(event: Event) -> dict[str, float]:
    """Return the known scores of guessing at the headlines of an ``eval_finished`` event."""
    known = event.get("scores", {})
    found = {name: number(known[name], "chance") for name in headlines(known)}
    return {_plain(name): value for name, value in found.items() if math.isfinite(value)}


def scores(event: Event, own_contract: str, shift_s: float) -> Scores:
    """Return the data of an ``eval_finished`` event that mirrors get.

    Args:
        own_contract: the run's contract; empty if it is not known.
        shift_s: seconds to add to its time.
    """
    contract = str(event.get("contract", ""))
    group = f"eval_contract_{contract[:8]}" if own_contract and contract != own_contract else "eval"
    values = {
        _plain(task): float(score["value"])
        for task, score in event.get("scores", {}).items()
        if score.get("value") is not None
    }
    time_unix_s = event["time_unix_s"] + shift_s
    return Scores(int(event["step"]), int(event["milestone_tokens"]), time_unix_s, group, values, contract.isdecimal())


def _plain(task: str) -> str:
    return re.sub(r"[^\w./ -]", "_", task)
