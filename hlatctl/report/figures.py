"""Draw the report's figures as SVG text; the only importer of matplotlib, imported when a figure is drawn."""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from conf.schedule import learning_rate
from conf.schema import Config
from hlatctl.report.forecast import Simulation
from hlatctl.report.goodput import Goodput, label
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, Numbers, column, comparable, envelope, finite_or_nan, smooth, thin
from hlatctl.run.errors import DependencyError
from hlatctl.run.scores import HELD_OUT, headlines
from hlatctl.run.state import RunState
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Names of figures; the others are named in ``draw``.
TIME, SCORES = "time", "scores"
INK, FAINT, MARK, QUIET, AMENDED = "#1c4e80", "#a9c3dd", "#c4561a", "#8a8f98", "#5b8e7d"
#: Colours of the categories of wall time. Restarts share one colour; categories not listed here share others.
_TIME_COLOURS = {
    "productive": INK,
    "data_wait": "#6d9dc5",
    "checkpoint_stall": "#e0a458",
    "between_steps": FAINT,
    "lost": MARK,
    "restart": "#8c2f39",
    "start": "#c99a8b",
    "compile": "#5b8e7d",
    "evaluation_wait": "#9d7fb0",
    "end": "#c7b8d3",
    "idle": "#e6e8eb",
}
#: Smaller shares are left out of the legend.
_LEAST_SHARE = 0.001
#: A legend with more labels is placed above the figure.
_LABELS_INSIDE = 3
#: Points per line; a line has fewer pixels than this.
MAX_POINTS = 1500
_STYLE: Any = {
    # Keep text as text: small files, searchable, in the page's typeface.
    "svg.fonttype": "none",
    "svg.hashsalt": "hlatctl",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": "#333",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#555",
    "ytick.color": "#555",
    "lines.linewidth": 1.3,
    "legend.frameon": False,
}


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
        shown = ("loss", "grad_norm", "param_norm", "tokens_per_s") if is_thinned else ()
        values, ranges = {}, {}
        for name in ("loss", "grad_norm", "param_norm", "lr", "tokens_per_s", "data_wait_s", "step_s"):
            every = column(state, name)
            values[name] = thin(every, MAX_POINTS)
            if name in shown:
                ranges[name] = envelope(every, MAX_POINTS)
        values["smooth_loss"] = values["loss"]
        if len(state.steps) < MAX_POINTS * LOSS_WINDOW_STEPS:  # in a longer run, each point is such a mean already
            values["smooth_loss"] = thin(smooth(column(state, "loss"), LOSS_WINDOW_STEPS), MAX_POINTS)
        return cls(thin(column(state, "tokens"), MAX_POINTS), values, ranges)


def draw(state: RunState, config: Config, run: Numbers, time: Goodput) -> dict[str, str]:
    """Return SVG text by figure name; empty if the run has no steps.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    series = Series.of(state)
    if not series.tokens:
        return {}
    figures: dict[str, Callable[[Axes], None]] = {
        "loss": lambda axes: _loss(axes, series, run),
        "gradient_norm": lambda axes: _gradient_norm(axes, series, state),
        "parameter_norm": lambda axes: _line(axes, series, "param_norm", "parameter norm (L2)"),
        "learning_rate": lambda axes: _learning_rate(axes, series, state, config),
        "throughput": lambda axes: _throughput(axes, series),
    }
    lines = _Lines(
        restarts=[attempt.tokens for attempt in run.attempts[1:]],
        amendments={str(a.number): a.tokens for a in run.amendments if a.tokens is not None},
    )
    last_tokens = max(config.total_tokens, series.tokens[-1])
    drawn = {
        name: svg(partial(_over_tokens, plot, lines, last_tokens), height_in=3.4 if name == "loss" else 2.1)
        for name, plot in figures.items()
    }
    scores = _score_lines(run)
    if scores:
        drawn[SCORES] = svg(partial(_over_tokens, partial(_scores, scores), lines, last_tokens), height_in=3.4)
    return {**drawn, TIME: svg(partial(_time, time), height_in=1.9)}


def draw_forecast(variants: Mapping[str, Sequence[Simulation]]) -> str:
    """Return a figure of each variant's wall times as SVG text, with one mark per simulation.

    Raises:
        DependencyError: matplotlib is not installed.
    """

    def plot(axes: Axes) -> None:
        for row, simulations in enumerate(reversed(list(variants.values()))):
            days = sorted(simulation.wall_s / 86400 for simulation in simulations if not simulation.message)
            if days:
                axes.plot(days, [row] * len(days), "|", color=INK, markersize=14, alpha=0.6)
                axes.plot(statistics.median(days), row, "o", color=MARK, markersize=5)
        axes.set_yticks(range(len(variants)), list(variants)[::-1])
        axes.set_xlabel("days from the run's creation to its end; marks are simulations, dots are medians")

    return svg(plot, height_in=0.6 + 0.35 * len(variants))


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """Vertical lines of a figure, in tokens: restarts, and amendments by their label."""

    restarts: Sequence[int]
    amendments: Mapping[str, int]


def _over_tokens(plot: Callable[[Axes], None], lines: _Lines, last_tokens: float, axes: Axes) -> None:
    plot(axes)
    for tokens in lines.restarts:
        axes.axvline(tokens, color=QUIET, linewidth=0.9, linestyle=(0, (3, 3)))
    for number, tokens in lines.amendments.items():
        axes.axvline(tokens, color=AMENDED, linewidth=0.9)
        axes.annotate(
            number,
            (tokens, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -8),
            textcoords="offset points",
            color=AMENDED,
            fontsize=7,
        )
    axes.set_xlim(0, last_tokens)
    axes.xaxis.set_major_formatter(lambda value, _: count(value))
    axes.set_xlabel("tokens")
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > _LABELS_INSIDE:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8)
    elif labels:
        axes.legend(loc="upper right", fontsize=8)


def _time(time: Goodput, axes: Axes) -> None:
    left, others = 0.0, itertools.cycle(("#b7bcc4", "#cdd1d6", "#a3a9b2"))
    for category, seconds in time.seconds.items():
        share = seconds / time.wall_s
        colour = _TIME_COLOURS.get(category.split(":")[0]) or next(others)
        shown = f"{label(category)} {100 * share:.1f} %" if share >= _LEAST_SHARE else None
        axes.barh(0, 100 * share, left=left, color=colour, label=shown, height=0.6)
        left += 100 * share
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of wall time")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)


def svg(plot: Callable[[Axes], None], *, height_in: float) -> str:
    """Return one figure as SVG text, as wide as the page.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise DependencyError("the report's figures need matplotlib", hint="pip install 'hlatctl[head]'") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, height_in), layout="constrained")
        axes = figure.add_subplot()
        plot(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _loss(axes: Axes, series: Series, run: Numbers) -> None:
    each: Any = {"color": FAINT, "linewidth": 0.8, "label": "training, each step"}
    if "loss" in series.ranges:
        axes.fill_between(series.tokens, *series.ranges["loss"], **each)
    else:
        axes.plot(series.tokens, series.values["loss"], **each)
    axes.plot(
        series.tokens, series.values["smooth_loss"], color=INK, label=f"training, mean of {LOSS_WINDOW_STEPS} steps"
    )
    scores = comparable(run.milestones, "validation_loss")  # scores under other contracts are only in the table
    scored = [(milestone.tokens, score.value) for milestone, score in scores if score.value is not None]
    if scored:
        axes.plot(
            *zip(*scored, strict=True), "o", color=MARK, markersize=5, clip_on=False, label="validation, at milestones"
        )
        for tokens, value in scored:
            axes.annotate(
                f"{value:.3f}",
                (tokens, value),
                xytext=(-4, 7),
                textcoords="offset points",
                color=MARK,
                fontsize=8,
                horizontalalignment="right",
            )
    axes.set_ylabel("loss (nats per token)")


def _score_lines(run: Numbers) -> dict[str, list[tuple[int, float, float]]]:
    """Return tokens, value and standard error (0: none) of each headline with two or more comparable scores."""
    tasks = {score.task for milestone in run.milestones for score in milestone.scores}
    lines = {}
    for task in headlines(sorted(tasks)):
        points = [
            (milestone.tokens, score.value, score.stderr or 0.0)
            for milestone, score in comparable(run.milestones, task)
            if score.value is not None and not task.startswith(HELD_OUT)
        ]
        if len(points) > 1:
            lines[task] = points
    return lines


def _scores(lines: Mapping[str, Sequence[tuple[int, float, float]]], axes: Axes) -> None:
    for (task, points), marker in zip(lines.items(), itertools.cycle("os^Dv"), strict=False):
        tokens, values, errors = zip(*points, strict=True)
        axes.errorbar(
            tokens,
            values,
            yerr=errors,
            marker=marker,
            markersize=4,
            linewidth=1.0,
            capsize=2,
            clip_on=False,
            label=task,
        )
    axes.set_ylabel("score, ± standard error")
    axes.set_ylim(0, 1)


def _gradient_norm(axes: Axes, series: Series, state: RunState) -> None:
    _line(axes, series, "grad_norm", "gradient norm (L2)")
    spikes = [
        (finite_or_nan(state.steps[at]["tokens"]), finite_or_nan(spike.get("grad_norm")))
        for spike in state.spikes
        if (at := int(spike.get("step", 0))) in state.steps
    ]
    if spikes:
        axes.plot(*zip(*spikes, strict=True), "^", color=MARK, markersize=4, label="spike")


def _learning_rate(axes: Axes, series: Series, state: RunState, config: Config) -> None:
    """Draw the learning rate of the trained steps, and that of the planned ones."""
    _line(axes, series, "lr", "learning rate")
    left = range(state.step + 1, config.total_steps + 1)
    if left:
        every = max(1, len(left) // MAX_POINTS)
        steps = [*left[::every], left[-1]]
        planned = [learning_rate(step, config) for step in steps]
        axes.plot([config.tokens_at(step) for step in steps], planned, color=FAINT, linestyle="--", label="planned")


def _throughput(axes: Axes, series: Series) -> None:
    _line(axes, series, "tokens_per_s", "tokens per second")
    axes.set_ylim(bottom=0)
    waits = series.values["data_wait_s"]
    share = [100 * wait / step if step else math.nan for wait, step in zip(waits, series.values["step_s"], strict=True)]
    right = axes.twinx()
    right.plot(series.tokens, share, color=MARK, linewidth=0.9)
    right.set_ylabel("data wait (% of step)", color=MARK)
    right.set_ylim(0, max(5.0, *(value for value in share if not math.isnan(value)), 0.0))
    right.grid(visible=False)


def _line(axes: Axes, series: Series, name: str, label: str) -> None:
    if name in series.ranges:
        axes.fill_between(series.tokens, *series.ranges[name], color=FAINT, linewidth=0.8)
    axes.plot(series.tokens, series.values[name], color=INK)
    axes.set_ylabel(label)
