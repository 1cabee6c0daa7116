"""A figure and its data, as SVG, PNG, PDF and CSV, and what figures share: style, the axis of tokens, thinned series.

This is the only importer of matplotlib, which is imported when a figure is drawn. The same data give the same bytes: no
file contains a time. Sizes fit one column of a paper. The colours are those of Okabe and Ito
(https://jfly.uni-koeln.de/color/), which colour-blind people can tell apart.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hlatctl.report.numbers import LOSS_WINDOW_STEPS, Numbers, column, envelope, smooth, thin
from hlatctl.run.errors import DependencyError, install
from hlatctl.run.state import RunState
from hlatctl.run.step_metrics import STEP_METRICS
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: One column of a two-column paper, in inches.
WIDTH_IN, HEIGHT_IN = 3.35, 2.15
PNG_DOTS_PER_IN = 300
INK, HIGHLIGHT, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
#: For ranges behind a line of ``INK``, for what matters less, and for axes.
FAINT, QUIET, AXIS = "#b3d4e8", "#8a8f98", "#444444"
AMENDED = GREEN
#: Colours of lines after ``INK``, in order. With the markers, lines also differ in black and white.
OTHERS = (HIGHLIGHT, GREEN, PURPLE, ORANGE, SKY, QUIET)
DASHES: tuple[Any, ...] = ((0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (3, 3)), (0, (6, 1, 1, 1, 1, 1)))
SMALL_PT = 6.5

#: matplotlib's settings.
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "hlatctl",
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": SMALL_PT,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.borderaxespad": 0.3,
    "legend.columnspacing": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": AXIS,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "errorbar.capsize": 2,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.02,
    "figure.constrained_layout.w_pad": 0.02,
}


#: Metadata without the time and the version.
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    Args:
        header, rows: the figure's data, for CSV; NaN and None are empty cells. Headers name units.
    """

    name: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    plot: Callable[[Axes], None]
    width_in: float = WIDTH_IN
    height_in: float = HEIGHT_IN

    def svg(self) -> str:
        """Return the figure as SVG text, with a transparent background."""
        return self.picture("svg").decode()

    def picture(self, suffix: str) -> bytes:
        """Return the figure as the bytes of an ``svg``, ``png`` or ``pdf`` file."""
        return picture(self.plot, suffix, width_in=self.width_in, height_in=self.height_in)

    def csv(self) -> str:
        """Return the data in the figure as CSV text with a header."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return buffer.getvalue()


def picture(plot: Callable[[Axes], None], suffix: str, *, width_in: float, height_in: float) -> bytes:
    """Return a drawing as a file's bytes; SVG has a transparent background.

    Args:
        suffix: ``svg``, ``png`` or ``pdf``.
        width_in, height_in: size in inches.
    """
    buffer, transparent = io.BytesIO(), suffix == "svg"
    with _styled():
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(width_in, height_in))
        plot(canvas.add_subplot())
        metadata = _METADATA[suffix]
        canvas.savefig(buffer, format=suffix, dpi=PNG_DOTS_PER_IN, transparent=transparent, metadata=metadata)
    return buffer.getvalue()


@contextmanager
def _styled() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise DependencyError("the report's figures need matplotlib", hint=install("head")) from None
    settings: Any = SETTINGS
    with matplotlib.rc_context(settings):
        yield


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.8g}"
    return "" if value is None else value


#: This share of the points may lie beyond a robust limit: the first steps of a run, and single spikes.
_BEYOND = 0.02
#: Free space above and below the points, as a share of their range.
_ROOM = 0.06
#: A value this many times the median is shown on a logarithmic axis.
_LOG_FROM = 10.0
#: A legend with more labels is placed above the figure.
_LABELS_INSIDE = 3


#: Narrower bands have no room for the name of their stage.
_NAMED_FRACTION = 0.2


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Tokens at which something happened: restarts, amendments by their number, and the begin of stages by name."""

    restarts: Sequence[int]
    amendments: Mapping[str, int]
    last_tokens: float
    stages: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Numbers) -> Marks:
        """Return the marks of a run."""
        return cls(
            restarts=[attempt.tokens for attempt in run.attempts[1:]],
            amendments={str(a.number): a.tokens for a in run.amendments if a.tokens is not None},
            last_tokens=max(run.total_tokens, run.tokens),
            stages=run.training_stages,
        )

    def caption(self) -> str:
        """Return what the marks mean; empty if there are none."""
        parts = ["grey ticks at the bottom are restarts"] if self.restarts else []
        parts += ["numbered green lines are amendments"] if self.amendments else []
        parts += ["grey bands are the stages of training"] if self.stages else []
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
    bounds = [*marks.stages.values(), marks.last_tokens]
    for at, (name, (begin, end)) in enumerate(zip(marks.stages, itertools.pairwise(bounds), strict=True)):
        axes.axvspan(begin, end, color=QUIET, alpha=0.12 if at % 2 else 0.0, linewidth=0, zorder=0)
        if end - begin >= _NAMED_FRACTION * marks.last_tokens:
            place: Any = {"xycoords": ("data", "axes fraction"), "xytext": (2, 8), "textcoords": "offset points"}
            axes.annotate(name, (begin, 0.0), color=QUIET, fontsize=SMALL_PT, **place)
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


def line(axes: Axes, series: Series, name: str) -> None:
    """Draw a value over tokens, with the range of each point's steps behind it."""
    if name in series.ranges:
        axes.fill_between(series.tokens, *series.ranges[name], color=FAINT, linewidth=0)
    axes.plot(series.tokens, series.values[name], color=INK)


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
