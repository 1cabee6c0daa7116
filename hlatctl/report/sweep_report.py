"""A sweep's report as a page and as Markdown, with figures of losses, settings, results and importance of the axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlatctl.report import html_pages
from hlatctl.report.figures.axes import MAX_POINTS
from hlatctl.report.figures.figure import GREEN, HIGHLIGHT, INK, ORANGE, PURPLE, QUIET, SKY, picture
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, column, smooth, thin
from hlatctl.report.summary import table as markdown_table
from hlatctl.report.sweep import Arm, arms, facts, header, rows
from hlatctl.run.labels import MARK, REPORT
from hlatctl.run.state import RunState
from hlatctl.run.sweep import SweepState
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_TRIAL_HEADER = ["trial", "arm", "seed", "value", "tokens", "hours", "status", "reason"]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The best arm.

    Args:
        text: the setting, as overrides.
        command: shell command that trains this setting.
        experiment: YAML for ``conf/experiment``.
    """

    text: str
    command: str
    experiment: str


def render(state: SweepState, figures: Mapping[str, str], winner: Winner | None) -> str:
    """Return the page as HTML text.

    Args:
        figures: SVG text by name.
        winner: None if no trial has a value.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    return html_pages.fill(
        "sweep.html",
        title=state.sweep_id,
        kicker="sweep",
        created_unix_s=state.created_unix_s,
        simulated=state.simulated,
        facts=facts(state)[1:],
        figures=figures,
        arms={
            "header": header(state),
            "rows": rows(state),
            "have_seeds": any(trial.seed is not None for trial in state.trials.values()),
        },
        trials={"header": _TRIAL_HEADER, "rows": trial_rows(state)},
        winner=winner,
    )


def markdown(state: SweepState, importances: Mapping[str, float], winner: Winner | None) -> str:
    """Return the page's content as Markdown, without figures."""
    parts = [f"# {state.sweep_id}\n"]
    if state.simulated:
        parts.append(f"**{MARK}**: {REPORT}\n")
    parts += [markdown_table(["", ""], [list(fact) for fact in facts(state)[1:]]), "## Arms\n"]
    parts.append(markdown_table(header(state), rows(state)))
    if importances:
        shares = [[key, f"{100 * share:.0f} %"] for key, share in importances.items()]
        parts += ["## Importance of the axes\n", markdown_table(["axis", "share"], shares)]
    if winner:
        parts += ["## The best arm\n", f"    {winner.command}\n"]
    parts += ["## Trials\n", markdown_table(_TRIAL_HEADER, trial_rows(state))]
    return "\n".join(parts)


def trial_rows(state: SweepState) -> list[list[str]]:
    """Return a row per trial, those of the best arm first."""
    return [
        [
            trial.run_id,
            str(trial.arm),
            "–" if trial.seed is None else str(trial.seed),
            "–" if trial.value is None else f"{trial.value:.4f}",
            count(trial.tokens),
            f"{trial.process_hours:.3g}",
            trial.status,
            trial.why or "–",
        ]
        for arm in arms(state)
        for trial in arm.trials
    ]


LOSS, SETTINGS, IMPORTANCES = "loss", "settings", "importances"
#: Colours of the best arms, best first; all others are grey.
_COLOURS = (INK, HIGHLIGHT, GREEN, PURPLE, ORANGE, SKY, "#000000", "#f0e442")
_OTHERS = "#d3d7dc"
#: Width of both columns of a paper.
_WIDTH_IN = 7.0
#: Longest text of a setting in a legend, in characters.
_LONGEST = 44
#: The y axis covers the losses after this share of the tokens, because the first losses would flatten the rest.
_SHOWN_FROM = 0.1


@dataclass(frozen=True)
class Curve:
    """A trial's training loss by tokens, smoothed."""

    tokens: list[float]
    losses: list[float]

    @classmethod
    def of(cls, state: RunState) -> Curve:
        """Return the curve of a folded journal."""
        return cls(
            thin(column(state, "tokens"), MAX_POINTS),
            thin(smooth(column(state, "loss"), LOSS_WINDOW_STEPS), MAX_POINTS),
        )


def draw(state: SweepState, curves: Mapping[int, Curve], importances: Mapping[str, float]) -> dict[str, str]:
    """Return SVG text by figure name, without figures that would be empty.

    Args:
        curves: loss curves by trial number.
        importances: importance of each axis, greatest first.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    ranked = arms(state)
    drawn = {}
    if any(curve.tokens for curve in curves.values()):
        drawn[LOSS] = _svg(lambda axes: _losses(axes, ranked, curves), height_in=4.0)
    valued = [arm for arm in ranked if arm.mean is not None]
    if state.axes and len(valued) > 1:
        drawn[SETTINGS] = _svg(lambda axes: _settings(axes, state, valued), height_in=3.4)
    if importances:
        drawn[IMPORTANCES] = _svg(lambda axes: _importances(axes, importances), height_in=0.7 + 0.3 * len(importances))
    return drawn


def _svg(plot: Callable[[Axes], None], *, height_in: float) -> str:
    return picture(plot, "svg", width_in=_WIDTH_IN, height_in=height_in).decode()


def _losses(axes: Axes, ranked: Sequence[Arm], curves: Mapping[int, Curve]) -> None:
    others = len(ranked) - len(_COLOURS)
    for rank, arm in reversed(list(enumerate(ranked))):  # draw the best on top
        for trial in arm.trials:
            curve = curves.get(trial.number)
            if curve is None or not curve.tokens:
                continue
            axes.plot(curve.tokens, curve.losses, color=_colour(rank), linewidth=1.1, alpha=0.9)
            if trial.ended and trial.status != "finished":
                axes.plot(curve.tokens[-1], curve.losses[-1], "x", color=_colour(rank), markersize=5)
    for rank, arm in enumerate(ranked[: len(_COLOURS)]):
        axes.plot([], [], color=_colour(rank), label=_short(_label(arm)))
    if others > 0:
        axes.plot([], [], color=_OTHERS, label=f"{others} more")
    axes.set_ylim(*_range([curve for curve in curves.values() if curve.tokens]))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: count(value))
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"training loss, mean of {LOSS_WINDOW_STEPS} steps")
    axes.legend(loc="upper right", fontsize=8)


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    last = max(max(curve.tokens) for curve in curves)
    values = [
        loss
        for curve in curves
        for at, loss in zip(curve.tokens, curve.losses, strict=True)
        if at >= _SHOWN_FROM * last and math.isfinite(loss)
    ]
    values = values or [loss for curve in curves for loss in curve.losses if math.isfinite(loss)] or [0.0, 1.0]
    room = 0.05 * (max(values) - min(values)) or 0.1
    return min(values) - room, max(values) + room


def _settings(axes: Axes, state: SweepState, valued: Sequence[Arm]) -> None:
    scales = [_Scale.of(axis, [arm.point[str(axis["key"])] for arm in valued]) for axis in state.axes]
    means = [arm.mean for arm in valued if arm.mean is not None]
    scales.append(_Scale.linear(min(means), max(means)))
    for rank, arm in reversed(list(enumerate(valued))):
        heights = [scale.at(arm.point[str(axis["key"])]) for scale, axis in zip(scales, state.axes, strict=False)]
        heights.append(scales[-1].at(str(arm.mean)))
        axes.plot(range(len(heights)), heights, color=_colour(rank), linewidth=2.2 if rank == 0 else 1.1, clip_on=False)
    for at, scale in enumerate(scales):
        axes.axvline(at, color=QUIET, linewidth=0.9)
        for text, height in scale.ticks:
            axes.annotate(
                text,
                (at, height),
                xytext=(5, 0),
                textcoords="offset points",
                fontsize=8,
                color="#333",
                verticalalignment="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
            )
    names = [*(_short(str(axis["key"]), 22) for axis in state.axes), _short(state.objective, 22)]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.05, len(names) - 1 + 0.12 * (len(names) - 1))
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([])
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


@dataclass(frozen=True)
class _Scale:
    """The position of values on an axis, from 0 to 1.

    Args:
        heights: positions of listed values; empty for numbers between ``low`` and ``high``.
        log: logarithmic axis.
    """

    heights: dict[str, float]
    low: float = 0.0
    high: float = 1.0
    log: bool = False

    @classmethod
    def of(cls, axis: Mapping[str, Any], tried: Sequence[str]) -> _Scale:
        if axis["low"] is None:
            values = [value for value in axis["values"] if value in tried]
            return cls({value: (at + 0.5) / len(values) for at, value in enumerate(values)})
        numbers = [float(value) for value in tried]
        return cls({}, min(numbers), max(numbers), bool(axis["log"]))

    @classmethod
    def linear(cls, low: float, high: float) -> _Scale:
        return cls({}, low, high)

    def at(self, text: str) -> float:
        if self.heights:
            return self.heights[text]
        low, high, value = self.low, self.high, float(text)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high > low else 0.5

    @property
    def ticks(self) -> list[tuple[str, float]]:
        if self.heights:
            return [(_short(text, 18), height) for text, height in self.heights.items()]
        ends = dict.fromkeys((self.low, self.high))
        return [(f"{end:.4g}", self.at(str(end))) for end in ends]


def _importances(axes: Axes, importances: Mapping[str, float]) -> None:
    names = list(importances)[::-1]
    axes.barh(names, [100 * importances[name] for name in names], color=INK, height=0.55)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the variance that single axes explain")
    axes.grid(visible=False, axis="y")


def _label(arm: Arm) -> str:
    return " ".join(f"{key.rsplit('.', maxsplit=1)[-1]}={value}" for key, value in arm.point.items()) or arm.text


def _colour(rank: int) -> str:
    return _COLOURS[rank] if rank < len(_COLOURS) else _OTHERS


def _short(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"…{text[1 - longest :]}"
