"""A ladder's forecast beside its result: facts and tables of the target, and the figure of loss by compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hlatctl.report.figures.figure import GREEN, HIGHLIGHT, INK
from hlatctl.report.numbers import LOSS_WINDOW_STEPS
from hlatctl.run.state import ForecastState, RunState
from hlatctl.run.sweep import SweepState
from hlatctl.units import bounded, number, utc

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The law of each name.
_LAWS = {"size": "E + A / N^alpha + B / D^beta", "compute": "E + A / C^gamma"}
#: The objective that is the training loss.
_TRAINING = "loss"


def results_of(state: SweepState) -> list[float]:
    """Return the objective of a ladder's target, if it has finished."""
    of_target = [trial.value for trial in state.trials.values() if trial.arm == state.target]
    return [value for value in of_target if value is not None]


def result_of_run(state: RunState) -> list[float]:
    """Return the objective at the end of a run that a forecast was made for, if it has finished."""
    made = state.forecast
    if made is None or state.status != "finished":
        return []
    if made.objective == _TRAINING:
        losses = [number(step, "loss") for step in state.steps.last(LOSS_WINDOW_STEPS)]
        return [math.fsum(losses) / len(losses)] if losses else []
    name = made.objective.removeprefix("eval.")
    last = state.milestones.get(round(made.target["tokens"]))
    found = number(last.scores[name], "value") if last and name in last.scores else math.nan
    return [found] if math.isfinite(found) else []


def facts(made: ForecastState, results: Sequence[float]) -> list[tuple[str, str]]:
    """Return a forecast as name and text: the value with its bounds, the result, the law, and how far it reaches."""
    coverage, reach = f"{100 * made.coverage:.0f} %", made.target["flops"] / max(rung["flops"] for rung in made.rungs)
    bounds = f", {coverage} within the bounds" if made.loss["low"] is not None else ""
    no_error = "" if bounds else ", no error: as many constants as rungs"
    rungs = len({(rung["parameters"], rung["tokens"]) for rung in made.rungs})  # each may have several seeds
    constants = ", ".join(f"{name} = {_constant(value)}" for name, value in made.constants.items())
    rows = [
        ("forecast", f"{made.objective} {bounded(made.loss)}{bounds}{no_error}, made {utc(made.made_unix_s)}"),
        *(("result", compared(made, result)) for result in results),
        ("law", f"{_LAWS.get(made.law, made.law)}: {constants}"),
        ("note", f"one law of compute: {made.why}" if made.why else ""),
        ("reach", f"{reach:.3g} times the compute of the largest of {rungs} rungs"),
    ]
    if made.held_out:
        value, loss = made.held_out["value"], made.held_out["loss"]
        rows.append(("held out", f"the law of the other rungs gives the largest one {value:.4f}: {_off(value, loss)}"))
    return [(name, text) for name, text in rows if text]


def compared(made: ForecastState, result: float) -> str:
    """Return a result beside its forecast, in words."""
    value, low, high = (made.loss[name] for name in ("value", "low", "high"))
    assert value is not None
    inside = ""
    if low is not None and high is not None:
        inside = ", within the bounds" if low <= result <= high else ", outside the bounds"
    return f"{made.objective} {result:.4f}: {_off(value, result)}{inside}"


def _off(forecast: float, result: float) -> str:
    return f"the forecast is {100 * abs(forecast / result - 1):.2f} % too {'high' if forecast > result else 'low'}"


def deviation(state: SweepState, values: Sequence[float], arm: int) -> str:
    """Return how far the final loss of a rung, or of the target, is from the law."""
    made = state.forecast
    if made is None or not values:
        return "–"
    fitted = made.loss["value"] if arm == state.target else None
    for rung in made.rungs if fitted is None else ():
        if state.trials[int(rung["trial"])].arm == arm:
            fitted = rung["fitted"]
    return "–" if not fitted else f"{100 * (math.fsum(values) / len(values) / fitted - 1):+.2f} %"


def scores(made: ForecastState) -> tuple[list[str], list[list[str]]]:
    """Return the header and a row per task of the forecasts of scores."""
    rows = [
        [task, "–", "–", str(score["why"])]
        if "value" not in score
        else [task, bounded(score, 3), str(score["through"]), ""]
        for task, score in made.scores.items()
    ]
    return ["task", f"forecast ({100 * made.coverage:.0f} % bounds)", "by its", "none because"], rows


def _constant(value: dict[str, float | None]) -> str:
    low, high = value["low"], value["high"]
    return f"{value['value']:.4g}" + (f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else "")


def plot(axes: Axes, *, made: ForecastState, results: Sequence[float]) -> None:
    """Draw the final losses by compute, with the law, its band, and the target's forecast and result."""
    flops = [point["flops"] or 0.0 for point in made.curve]
    axes.plot(flops, _column(made.curve, "value"), color=INK, label=_LAWS.get(made.law, made.law))
    if made.loss["low"] is not None:
        axes.fill_between(flops, _column(made.curve, "low"), _column(made.curve, "high"), color=INK, alpha=0.15, lw=0)
    rungs = [(rung["flops"], rung["loss"]) for rung in made.rungs]
    axes.plot([at for at, _ in rungs], [loss for _, loss in rungs], "o", color=INK, label="rungs")
    value, low, high = (made.loss[name] for name in ("value", "low", "high"))
    assert value is not None
    error = None if low is None or high is None else [[value - low], [high - value]]
    axes.errorbar([made.target["flops"]], [value], yerr=error, fmt="D", color=HIGHLIGHT, label="forecast")
    if results:
        axes.plot([made.target["flops"]] * len(results), results, "*", color=GREEN, markersize=9, label="result")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = _ticks([value, *(loss for _, loss in rungs), *results])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("training compute, FLOPs")
    axes.set_ylabel(made.objective)
    axes.legend(loc="upper right", fontsize=8)


def _column(curve: Sequence[dict[str, float | None]], name: str) -> list[float]:
    return [math.nan if (value := point[name]) is None else value for point in curve]


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round values over a range."""
    low, high = min(values), max(values)
    step = next(step for step in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 1e6) if (high - low) / step <= 8)
    first = math.floor(low / step)
    return [round(step * (first + index), 4) for index in range(int((high - low) / step) + 3) if first + index > 0]
