"""What a run's report says, as plain numbers; pure. How they look is for ``figures``, ``page`` and ``summary``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from hlatctl.plan.arithmetic import flops_per_token
from hlatctl.run.journal import Event
from hlatctl.run.state import ContractScores, RunState

#: Steps over which the loss of "now" is averaged: one batch's loss says little.
LOSS_WINDOW_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task at one milestone; ``stderr`` is None where the task has none.

    ``contract`` is what it was measured under: scores under different ones can't be compared.
    """

    task: str
    metric: str
    value: float | None
    stderr: float | None
    n: int | None
    contract: str


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """One milestone and its scores under one contract; under another one it is another of these.

    ``is_own`` is false where the contract is not that of the run's first evaluation.
    """

    tokens: int
    step: int
    status: str
    scores: list[Score]
    skipped: dict[str, str]
    message: str
    contract: str
    is_own: bool

    def score(self, task: str) -> Score | None:
        """The score of a task, if it has one."""
        return next((score for score in self.scores if score.task == task), None)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One training attempt; ``tokens`` is where it began, ``lost_steps`` what the next one had to do again."""

    number: int
    started_unix_s: float
    wall_s: float | None
    from_step: int
    tokens: int
    last_step: int
    lost_steps: int
    cause: str
    evidence: str
    decision: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the flow."""

    name: str
    status: str
    wall_s: float
    message: str


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A run in numbers.

    Args:
        first_loss, last_loss: mean over the first and the last 20 steps, nats per token.
        tokens_per_s: median over the steps.
        data_wait_fraction: share of the steps' time spent waiting for data.
        evaluates: the model from elsewhere that the run does nothing but evaluate; empty for a training run.
        sweep: that the run is a trial of; empty if of none.
    """

    run_id: str
    experiment_name: str
    status: str
    simulated: bool
    created_unix_s: float
    step: int
    total_steps: int
    tokens: int
    total_tokens: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    mfu_fraction: float | None
    data_wait_fraction: float | None
    lost_steps: int
    gradient_spikes: int
    milestones: list[Milestone]
    attempts: list[Attempt]
    stages: list[Stage]
    warnings: list[str]
    message: str
    evaluates: str
    sweep: str


def numbers(state: RunState, config: Config) -> Numbers:
    """Everything the report says about a state."""
    steps = steps_of(state)
    losses = column(steps, "loss")
    step_s = column(steps, "step_s")
    milestones, attempts = _milestones(state), _attempts(state, config)
    return Numbers(
        run_id=state.run_id,
        experiment_name=config.experiment_name,
        status=_status(state, config),
        simulated=state.simulated,
        created_unix_s=state.created_unix_s,
        step=state.step,
        total_steps=config.total_steps,
        tokens=state.tokens,
        total_tokens=config.total_tokens,
        first_loss=mean(losses[:LOSS_WINDOW_STEPS]),
        last_loss=mean(losses[-LOSS_WINDOW_STEPS:]),
        validation_loss=_newest_validation(milestones),
        tokens_per_s=median(column(steps, "tokens_per_s")),
        mfu_fraction=_mfu(state, config, median(column(steps, "tokens_per_s"))),
        data_wait_fraction=_ratio(sum(column(steps, "data_wait_s")), sum(step_s)),
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        gradient_spikes=len(state.spikes),
        milestones=milestones,
        attempts=attempts,
        stages=[
            Stage(name=stage.name, status=stage.status, wall_s=float(stage.wall_s), message=stage.message)
            for stage in state.stages.values()
        ],
        warnings=state.warnings,
        message=state.message,
        evaluates=state.evaluates,
        sweep=state.sweep,
    )


def steps_of(state: RunState) -> list[Event]:
    """The step events that count, in order."""
    return [state.steps[step] for step in sorted(state.steps)]


def column(steps: Sequence[Event], name: str) -> list[float]:
    """One field of the steps; what is missing is NaN, and so is what training made NaN."""
    return [finite_or_nan(step.get(name)) for step in steps]


def finite_or_nan(value: Any) -> float:
    """A journal's number, which may be the text ``nan`` or ``inf``, as a float that can be drawn."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def thin(values: Sequence[float], most: int) -> list[float]:
    """At most so many values: means of equal neighbourhoods."""
    if len(values) <= most:
        return list(values)
    edges = [len(values) * part // most for part in range(most + 1)]
    return [_mean_or_nan(values[start:end]) for start, end in itertools.pairwise(edges)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean around each value, ``window`` values in all where there are so many; it does not lag behind."""
    before, after = window // 2, window - window // 2
    return [_mean_or_nan(values[max(0, at - before) : at + after]) for at in range(len(values))]


def mean(values: Sequence[float]) -> float | None:
    """The mean of what is a number; None if nothing is."""
    finite = [value for value in values if not math.isnan(value)]
    return math.fsum(finite) / len(finite) if finite else None


def median(values: Sequence[float]) -> float | None:
    """The median of what is a number; None if nothing is."""
    finite = sorted(value for value in values if not math.isnan(value))
    if not finite:
        return None
    middle = len(finite) // 2
    return finite[middle] if len(finite) % 2 else (finite[middle - 1] + finite[middle]) / 2


def _status(state: RunState, config: Config) -> str:
    # The page is written by the flow's last stage, when the journal does not say "finished" yet.
    if state.evaluates and state.status == "running":
        return "evaluated"
    done = state.step >= config.total_steps and state.status == "running"
    return "trained" if done else state.status


def _milestones(state: RunState) -> list[Milestone]:
    rows = []
    for _, found in sorted(state.milestones.items()):
        shown = ContractScores(found.contract, found.scores, found.skipped)
        for judged in (shown, *found.others):
            rows.append(
                Milestone(
                    tokens=found.milestone_tokens,
                    step=found.step,
                    status=found.status,
                    skipped=dict(judged.skipped),
                    message=found.message,
                    contract=judged.contract,
                    is_own=not judged.scores or judged.contract == state.contract,
                    scores=[_score(task, score, judged.contract) for task, score in sorted(judged.scores.items())],
                )
            )
    return rows


def _score(task: str, score: dict[str, Any], contract: str) -> Score:
    count = score.get("n")
    return Score(
        task=task,
        metric=str(score.get("metric", "")),
        value=_number(score.get("value")),
        stderr=_number(score.get("stderr")),
        n=count if isinstance(count, int) else None,
        contract=str(score.get("contract") or contract),
    )


def comparable(milestones: list[Milestone], task: str) -> list[tuple[Milestone, Score]]:
    """A task's scores over the milestones that were measured under one contract: that of the first of them."""
    found = [(milestone, score) for milestone in milestones if (score := milestone.score(task))]
    return [(milestone, score) for milestone, score in found if score.contract == found[0][1].contract]


def _newest_validation(milestones: list[Milestone]) -> float | None:
    found = comparable(milestones, "validation_loss")
    return found[-1][1].value if found else None


def _attempts(state: RunState, config: Config) -> list[Attempt]:
    rows = []
    for attempt, after in itertools.zip_longest(state.attempts, state.attempts[1:]):
        begun = attempt.resumed_from_step or 0
        resumed = after.resumed_from_step if after else None
        ended = attempt.ended_unix_s
        rows.append(
            Attempt(
                number=attempt.number,
                started_unix_s=attempt.started_unix_s,
                wall_s=ended - attempt.started_unix_s if ended is not None else None,
                from_step=begun,
                tokens=begun * config.tokens_per_step,
                last_step=attempt.last_step or begun,
                lost_steps=max(0, attempt.last_step - resumed) if resumed is not None else 0,
                cause=attempt.cause,
                evidence=attempt.evidence,
                decision=attempt.decision,
                why=attempt.why,
            )
        )
    return rows


def _mfu(state: RunState, config: Config, tokens_per_s: float | None) -> float | None:
    """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B); none where the device's peak isn't known."""
    if tokens_per_s is None or not state.peak_flops_per_s:
        return None
    used = tokens_per_s * flops_per_token(config.model, config.train.seq_len)
    return used / (state.peak_flops_per_s * config.world_size)


def _number(value: Any) -> float | None:
    number = finite_or_nan(value)
    return None if math.isnan(number) else number


def _mean_or_nan(values: Sequence[float]) -> float:
    found = mean(values)
    return math.nan if found is None else found


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and math.isfinite(part) else None
