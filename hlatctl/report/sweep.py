"""A sweep's arms and trials as numbers and rows, and its report as a page and as Markdown, with figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hlatctl.report import html_pages, ladder
from hlatctl.report.figures.figure import GREEN, HIGHLIGHT, INK, MAX_POINTS, ORANGE, PURPLE, QUIET, SKY, picture
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, column, smooth, thin
from hlatctl.report.summary import table as markdown_table
from hlatctl.run.labels import MARK, REPORT, noted
from hlatctl.run.state import RunState
from hlatctl.run.sweep import SweepState, TrialState
from hlatctl.units import count


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of all axes, and its trials.

    Args:
        mean: mean of ``values``; None if there are none.
        stderr: standard error of the mean, from the sample's deviation; None with fewer than two values.
    """

    number: int
    point: dict[str, str]
    trials: list[TrialState]
    values: list[float]
    mean: float | None
    stderr: float | None

    @property
    def text(self) -> str:
        """Return the setting as overrides."""
        return " ".join(f"{key}={value}" for key, value in self.point.items()) or "-"


def arms(state: SweepState) -> list[Arm]:
    """Return the arms, best first; a ladder's by compute. Arms without a value come last, in order of their numbers."""
    numbers = sorted({trial.arm for trial in state.trials.values()})
    unsorted = [_arm(number, [t for _, t in sorted(state.trials.items()) if t.arm == number]) for number in numbers]
    if state.target is not None:
        return unsorted
    sign = -1.0 if state.direction == "max" else 1.0
    return sorted(unsorted, key=lambda arm: (math.inf if arm.mean is None else sign * arm.mean, arm.number))


def best(state: SweepState) -> Arm | None:
    """Return the best arm; None if no arm has a value, and in a ladder, whose rungs differ in size."""
    first = next(iter(arms(state)), None) if state.target is None else None
    return first if first is not None and first.mean is not None else None


def distance(arm: Arm, winner: Arm) -> tuple[float, float | None] | None:
    """Return an arm's mean difference from the winner's objective, and its standard error with two or more seeds.

    The difference is paired by seed: trials with the same seed start equally and see the same text, so they differ less
    than the means of their arms. None if no seed has finished in both.
    """
    theirs = {trial.seed: trial.value for trial in winner.trials if trial.value is not None}
    gaps = [t.value - theirs[t.seed] for t in arm.trials if t.value is not None and t.seed in theirs]
    return (math.fsum(gaps) / len(gaps), _stderr(gaps)) if gaps else None


def header(state: SweepState) -> list[str]:
    """Return the header of :func:`rows`."""
    return [
        "arm" if state.target is None else "rung",
        *(str(axis["key"]) for axis in state.axes),
        state.objective,
        "difference from best" if state.target is None else "deviation from the law",
        "trials",
        "hours",
        "saved",
        "status",
    ]


def rows(state: SweepState) -> list[list[str]]:
    """Return a row per arm, in the order of :func:`arms`: setting, objective, hours and the status of its trials."""
    winner = best(state)
    return [
        [
            "target" if arm.number == state.target else str(arm.number),
            *(arm.point[str(axis["key"])] for axis in state.axes),
            value_text(arm),
            _difference(arm, winner) if state.target is None else ladder.deviation(state, arm.values, arm.number),
            str(len(arm.trials)),
            f"{sum(t.process_hours for t in arm.trials):.3g}",
            f"{sum(t.saved_process_hours for t in arm.trials):.3g}",
            _status(arm),
        ]
        for arm in arms(state)
    ]


def facts(state: SweepState) -> list[tuple[str, str]]:
    """Return the known main facts of a sweep, as name and text."""
    unit = "accelerator-hours" if state.accelerators else "process-hours"
    trials = list(state.trials.values())
    saved = sum(trial.saved_process_hours for trial in trials)
    winner, lowest = best(state), "lowest" if state.direction == "min" else "highest"
    ended = state.count("finished", "pruned", "diverged", "failed")
    known = [
        (state.noun, noted(state.sweep_id, simulated=state.simulated)),
        ("status", state.status + (f": {state.message}" if state.message else "")),
        ("objective", state.objective + ("" if state.target is not None else f", the {lowest} is best")),
        ("trials", f"{ended} of {state.trials_planned} ended"),
        ("hours", f"{sum(trial.process_hours for trial in trials):.3g} {unit}"),
        ("saved", f"{saved:.3g} {unit} by ending trials early" if saved else ""),
        *(ladder.facts(state.forecast, ladder.results_of(state)) if state.forecast else ()),
        ("best", f"{winner.text}: {value_text(winner)}" if winner else ""),
        *(("warning", warning) for warning in state.warnings),
    ]
    return [(name, text) for name, text in known if text]


def value_text(arm: Arm) -> str:
    """Return mean and standard error of an arm's objective; a dash without a value."""
    if arm.mean is None:
        return "–"
    return f"{arm.mean:.4f}" + (f" ± {arm.stderr:.4f}" if arm.stderr is not None else "")


def _difference(arm: Arm, winner: Arm | None) -> str:
    gap = distance(arm, winner) if winner is not None and arm.number != winner.number else None
    if gap is None:
        return "–"
    return f"{gap[0]:+.4f}" + (f" ± {gap[1]:.4f}" if gap[1] is not None else "")


def _arm(number: int, trials: list[TrialState]) -> Arm:
    values = [trial.value for trial in trials if trial.value is not None]
    return Arm(
        number=number,
        point=trials[0].point,
        trials=trials,
        values=values,
        mean=math.fsum(values) / len(values) if values else None,
        stderr=_stderr(values),
    )


def _stderr(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _status(arm: Arm) -> str:
    statuses = [trial.status for trial in arm.trials]
    text = ", ".join(
        f"{statuses.count(status)} {status}" if len(statuses) > 1 else status for status in dict.fromkeys(statuses)
    )
    early = next((trial for trial in arm.trials if trial.status != "finished" and trial.ended), None)
    return f"{text} at {count(early.tokens)}" if early and early.tokens else text


if TYPE_CHECKING:
    from matplotlib.axes import Axes


_TRIAL_HEADER = ["trial", "arm", "seed", "value", "tokens", "hours", "status", "reason"]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The best arm: its setting as overrides, a shell command that trains it, and YAML for ``conf/experiment``."""

    text: str
    command: str
    experiment: str


def render(state: SweepState, figures: Mapping[str, str], winner: Winner | None) -> str:
    """Return the page as HTML text, with SVG figures by name; no winner if no trial has a value."""
    return html_pages.fill(
        "sweep.html",
        title=state.sweep_id,
        kicker=state.noun,
        arms_title=_arms_title(state),
        scores=ladder.scores(state.forecast) if state.forecast else None,
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


def markdown(
    state: SweepState, importances: Mapping[str, float], winner: Winner | None, figures: Iterable[str] = ()
) -> str:
    """Return the page's content as Markdown; ``figures`` are the names of SVG files in ``figures/`` next to it."""
    parts = [f"# {state.sweep_id}\n"]
    if state.simulated:
        parts.append(f"**{MARK}**: {REPORT}\n")
    parts += [markdown_table(["", ""], [list(fact) for fact in facts(state)[1:]]), f"## {_arms_title(state)}\n"]
    parts.append(markdown_table(header(state), rows(state)))
    if state.forecast and state.forecast.scores:
        parts += ["## Forecasts of scores\n", markdown_table(*ladder.scores(state.forecast))]
    if importances:
        shares = [[key, f"{100 * share:.0f} %"] for key, share in importances.items()]
        parts += ["## Importance of the axes\n", markdown_table(["axis", "share"], shares)]
    if winner:
        parts += ["## The best arm\n", f"    {winner.command}\n"]
    parts += [f"![{name}](figures/{name}.svg)\n" for name in figures]
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


LOSS, SETTINGS, IMPORTANCES, FORECAST = "loss", "settings", "importances", "forecast"
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
    """Return SVG text by figure name, without empty figures; ``curves`` by trial, greatest importance first."""
    ranked = arms(state)
    drawn = {}
    if state.forecast:
        drawn[FORECAST] = _svg(
            partial(ladder.plot, made=state.forecast, results=ladder.results_of(state)), height_in=3.6
        )
    if any(curve.tokens for curve in curves.values()):
        names = [_label(arm) if state.target is None else _rung(arm, state) for arm in ranked]
        drawn[LOSS] = _svg(lambda axes: _losses(axes, ranked, names, curves), height_in=4.0)
    valued = [arm for arm in ranked if arm.mean is not None]
    if state.axes and len(valued) > 1 and state.target is None:
        drawn[SETTINGS] = _svg(lambda axes: _settings(axes, state, valued), height_in=3.4)
    if importances:
        drawn[IMPORTANCES] = _svg(lambda axes: _importances(axes, importances), height_in=0.7 + 0.3 * len(importances))
    return drawn


def _svg(plot: Callable[[Axes], None], *, height_in: float) -> str:
    return picture(plot, "svg", width_in=_WIDTH_IN, height_in=height_in).decode()


def _losses(axes: Axes, ranked: Sequence[Arm], names: Sequence[str], curves: Mapping[int, Curve]) -> None:
    others = len(ranked) - len(_COLOURS)
    for rank, arm in reversed(list(enumerate(ranked))):  # draw the best on top
        for trial in arm.trials:
            curve = curves.get(trial.number)
            if curve is None or not curve.tokens:
                continue
            axes.plot(curve.tokens, curve.losses, color=_colour(rank), linewidth=1.1, alpha=0.9)
            if trial.ended and trial.status != "finished":
                axes.plot(curve.tokens[-1], curve.losses[-1], "x", color=_colour(rank), markersize=5)
    for rank, name in enumerate(names[: len(_COLOURS)]):
        axes.plot([], [], color=_colour(rank), label=_short(name))
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


def _rung(arm: Arm, state: SweepState) -> str:
    return "target" if arm.number == state.target else f"rung {arm.number}"


def _arms_title(state: SweepState) -> str:
    return "Arms" if state.target is None else "Rungs and target"


def _label(arm: Arm) -> str:
    return " ".join(f"{key.rsplit('.', maxsplit=1)[-1]}={value}" for key, value in arm.point.items()) or arm.text


def _colour(rank: int) -> str:
    return _COLOURS[rank] if rank < len(_COLOURS) else _OTHERS


def _short(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"…{text[1 - longest :]}"
