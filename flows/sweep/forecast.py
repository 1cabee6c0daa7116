"""The forecast of a ladder's target, from the final losses and the scores of its rungs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from conf.schema import Config
from conf.sizes import multiplied_parameters
from flows.sweep.book import Book
from hlatctl.plan import scaling
from hlatctl.plan.budget import total_flops
from hlatctl.plan.scaling import Forecast, Size
from hlatctl.run.errors import ConfigError
from hlatctl.run.evaluations import HELD_OUT, bits_of, headlines, is_better_low
from hlatctl.run.fold import read_state
from hlatctl.run.state import RunState
from hlatctl.run.sweep import TrialState
from hlatctl.units import number

#: The score that a task without bits per byte follows.
_LOSS = "validation_loss"


def size_of(config: Config) -> Size:
    """Return where a law is evaluated for a run."""
    return Size(parameters=multiplied_parameters(config.model), tokens=config.total_tokens, flops=total_flops(config))


def forecast(book: Book) -> dict[str, Any]:
    """Return the fields of ``forecast_made`` for the target of a ladder whose rungs have ended.

    Raises:
        ConfigError: too few rungs have finished.
    """
    target = size_of(book.variations.compose(book.space.points[-1]))
    rungs = [trial for trial in book.trials if trial.status == "finished" and trial.arm != book.space.target]
    sizes = [size_of(book.variations.compose(trial.point)) for trial in rungs]
    losses = [float(trial.value if trial.value is not None else math.nan) for trial in rungs]
    try:
        made = scaling.forecast(sizes, losses, target)
    except ValueError as error:
        raise ConfigError(
            f"{book.sweep.run_id}: no forecast, so no target is trained: {error}; {len(rungs)} rungs have finished",
            hint=f"`hlatctl status {book.sweep.run_id}` shows why others ended early; start a new ladder",
        ) from None
    most = max(range(len(rungs)), key=lambda index: sizes[index].flops)
    return {
        "ladder": book.sweep.run_id,
        "objective": book.objective.name,
        "law": made.law.name,
        "why": made.law.why,
        "loss": asdict(made.loss),
        "coverage": scaling.COVERAGE,
        "constants": {name: asdict(value) for name, value in made.constants.items()},
        "rungs": [
            {"trial": trial.number, **asdict(size), "loss": loss, "fitted": made.law.loss(size)}
            for trial, size, loss in zip(rungs, sizes, losses, strict=True)
        ],
        "target": asdict(target),
        "held_out": {}
        if made.held_out is None
        else {"trial": rungs[most].number, "value": made.held_out, "loss": losses[most]},
        "curve": [{"flops": flops, **asdict(value)} for flops, value in made.curve],
        "scores": _scores(book, rungs, sizes, target, made),
    }


def _scores(
    book: Book, rungs: list[TrialState], sizes: list[Size], target: Size, made: Forecast
) -> dict[str, dict[str, Any]]:
    """Return a forecast for each task that all rungs have at their ends, or why there is none."""
    states = [read_state(book.sweep.trial(trial.number)) for trial in rungs]
    finals = [_final(state) for state in states]
    common = [name for name in finals[0] if all(name in scores for scores in finals)] if finals else []
    tasks = [name for name in headlines(common) if not name.startswith(HELD_OUT) and not is_better_low(name)]
    laws = {_LOSS: made} if book.objective.score == _LOSS else {}
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        through = bits_of(task) if bits_of(task) in common else _LOSS
        try:
            if through not in laws:
                laws[through] = scaling.forecast(sizes, [number(scores[through], "value") for scores in finals], target)
            pairs = _pairs(states, task, through)
            errors = [error for scores in finals if math.isfinite(error := number(scores[task], "stderr"))]
            value = scaling.forecast_score(
                [loss for loss, _ in pairs],
                [score for _, score in pairs],
                laws[through],
                chance=_finite(number(finals[0][task], "chance")),
                stderr=max(errors, default=0.0),
            )
        except (KeyError, ValueError) as error:
            found[task] = {"why": str(error) if isinstance(error, ValueError) else f"the rungs have no {through}"}
            continue
        found[task] = {**asdict(value), "through": through}
    return found


def _final(state: RunState) -> Mapping[str, dict[str, Any]]:
    evaluated = [tokens for tokens, milestone in state.milestones.items() if milestone.status == "evaluated"]
    return state.milestones[max(evaluated)].scores if evaluated else {}


def _pairs(states: list[RunState], task: str, through: str) -> list[tuple[float, float]]:
    """Return loss and score of every milestone that has both as numbers."""
    pairs = [
        (number(milestone.scores[through], "value"), number(milestone.scores[task], "value"))
        for state in states
        for milestone in state.milestones.values()
        if through in milestone.scores and task in milestone.scores
    ]
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
