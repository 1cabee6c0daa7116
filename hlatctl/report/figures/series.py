"""The steps of a run as points of a figure, however many steps there are."""

from __future__ import annotations

from dataclasses import dataclass

from hlatctl.report.numbers import LOSS_WINDOW_STEPS, column, envelope, smooth, thin
from hlatctl.run.state import RunState
from hlatctl.run.step_metrics import STEP_METRICS

#: Points per line; a line has fewer pixels than this.
MAX_POINTS = 1500
_SHOWN = tuple(metric.name for metric in STEP_METRICS if metric.kept)
_RANGED = ("loss", "grad_norm", "param_norm", "tokens_per_s")


@dataclass(frozen=True)
class Series:
    """The steps that count, reduced to ``MAX_POINTS`` means.

    Args:
        tokens: of each point.
        values: by name.
        ranges: the least and the largest value of the steps of each point, so that a spike stays visible; empty if
            each step is a point.
    """

    tokens: list[float]
    values: dict[str, list[float]]
    ranges: dict[str, tuple[list[float], list[float]]]

    @classmethod
    def of(cls, state: RunState) -> Series:
        """Return the series of a folded journal."""
        is_thinned = len(state.steps) > MAX_POINTS
        values, ranges = {}, {}
        for name in _SHOWN:
            every = column(state, name)
            values[name] = thin(every, MAX_POINTS)
            if is_thinned and name in _RANGED:
                ranges[name] = envelope(every, MAX_POINTS)
        values["smooth_loss"] = values["loss"]
        if len(state.steps) < MAX_POINTS * LOSS_WINDOW_STEPS:  # in a longer run, each point is such a mean already
            values["smooth_loss"] = thin(smooth(column(state, "loss"), LOSS_WINDOW_STEPS), MAX_POINTS)
        return cls(thin(column(state, "tokens"), MAX_POINTS), values, ranges)

    def bounds(self, name: str) -> tuple[list[float], list[float]]:
        """Return the least and the largest value of each point."""
        return self.ranges.get(name, (self.values[name], self.values[name]))

    def table(self, name: str, unit: str) -> tuple[list[str], list[list[object]]]:
        """Return a header and rows for CSV: tokens, the value, and its least and largest if points are means."""
        columns = [self.tokens, self.values[name], *self.ranges.get(name, ())]
        titles = ["tokens", unit, *([f"{unit}_min", f"{unit}_max"] if name in self.ranges else [])]
        return titles, [list(row) for row in zip(*columns, strict=True)]
