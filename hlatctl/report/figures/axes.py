"""What figures over tokens share: the axis, marks of restarts and amendments, limits without outliers, and points.

However many steps a run has, a figure gets a bounded number of points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlatctl.report.figures.figure import AMENDED, FAINT, INK, QUIET, SMALL_PT
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, Numbers, column, envelope, smooth, thin
from hlatctl.run.state import RunState
from hlatctl.run.step_metrics import STEP_METRICS
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: This share of the points may lie beyond a robust limit: the first steps of a run, and single spikes.
_BEYOND = 0.02
#: Free space above and below the points, as a share of their range.
_ROOM = 0.06
#: A value this many times the median is shown on a logarithmic axis.
_LOG_FROM = 10.0
#: A legend with more labels is placed above the figure.
_LABELS_INSIDE = 3


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Tokens at which something happened: restarts, and amendments by their number."""

    restarts: Sequence[int]
    amendments: Mapping[str, int]
    last_tokens: float

    @classmethod
    def of(cls, run: Numbers) -> Marks:
        """Return the marks of a run."""
        return cls(
            restarts=[attempt.tokens for attempt in run.attempts[1:]],
            amendments={str(a.number): a.tokens for a in run.amendments if a.tokens is not None},
            last_tokens=max(run.total_tokens, run.tokens),
        )

    def caption(self) -> str:
        """Return what the marks mean; empty if there are none."""
        parts = ["grey ticks at the bottom are restarts"] if self.restarts else []
        parts += ["numbered green lines are amendments"] if self.amendments else []
        return f" In all figures over tokens, {', '.join(parts)}." if parts else ""


def over_tokens(axes: Axes, marks: Marks) -> None:
    """Format a figure whose x axis is tokens."""
    if marks.restarts:
        at_bottom = axes.get_xaxis_transform()
        axes.plot(
            marks.restarts, [0.0] * len(marks.restarts), "|", color=QUIET, markersize=7, transform=at_bottom, zorder=3
        )
    for number, tokens in marks.amendments.items():
        axes.axvline(tokens, color=AMENDED, linewidth=0.7)
        axes.annotate(
            number,
            (tokens, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(1.5, -6),
            textcoords="offset points",
            color=AMENDED,
            fontsize=SMALL_PT,
        )
    axes.set_xlim(0, marks.last_tokens)
    axes.locator_params(axis="x", nbins=6)
    if axes.get_yscale() == "linear":
        axes.locator_params(axis="y", nbins=6)  # ticks that depend on the height would make labels of another width
    axes.xaxis.set_major_formatter(lambda value, _: count(value))
    axes.set_xlabel("tokens")
    legend(axes)


def legend(axes: Axes) -> None:
    """Add a legend if the figure has labels: inside it, or above and below its title if there are many."""
    labels, title = axes.get_legend_handles_labels()[1], axes.get_title(loc="left")
    if len(labels) > _LABELS_INSIDE:
        axes.set_title("", loc="left")
        above: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 2}
        axes.legend(title=title, alignment="left", title_fontsize=SMALL_PT + 0.5, **above)
    elif labels:
        axes.legend(loc="upper right")


def line(axes: Axes, series: Series, name: str, *, colour: str = INK) -> None:
    """Draw a value over tokens, with the range of each point's steps behind it."""
    if name in series.ranges:
        axes.fill_between(series.tokens, *series.ranges[name], color=FAINT, linewidth=0)
    axes.plot(series.tokens, series.values[name], color=colour)


def robust_limits(lowest: Sequence[float], highest: Sequence[float]) -> tuple[float, float] | None:
    """Return limits of an axis that show all but the highest 2 % of the points; None without a finite value."""
    low, high = (sorted(value for value in values if math.isfinite(value)) for values in (lowest, highest))
    if not low or not high:
        return None
    top = high[max(0, math.ceil(len(high) * (1 - _BEYOND)) - 1)]
    room = _ROOM * (top - low[0]) or _ROOM * abs(top) or _ROOM
    return low[0] - room, top + room


def is_wide(values: Sequence[float]) -> bool:
    """Return whether positive values are so unequal that only a logarithmic axis shows them."""
    known = sorted(value for value in values if math.isfinite(value))
    return bool(known) and known[0] > 0 and known[-1] > _LOG_FROM * known[len(known) // 2]


def plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis at 1, 2 and 5 of each power of ten, as plain numbers."""
    low, high = axes.get_ylim()
    ticks = [mantissa * 10.0**power for power in range(-9, 19) for mantissa in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks([], minor=True)
    axes.set_yticks(shown, [count(tick) if tick >= 1000 else f"{tick:g}" for tick in shown])


#: Maximum points per line; a line has fewer pixels than this.
MAX_POINTS = 1500
_SHOWN = tuple(metric.name for metric in STEP_METRICS if metric.kept)
_RANGED = ("loss", "grad_norm", "param_norm", "tokens_per_s")


@dataclass(frozen=True)
class Series:
    """The steps that count, reduced to ``MAX_POINTS`` means.

    Args:
        tokens: tokens of each point.
        values: values by name.
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
