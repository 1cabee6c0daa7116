"""What a sweep compares: one number of a run at so many tokens, from its state. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from conf.load import token_count
from conf.schema import Config, SweepConfig
from hlatctl.run.errors import ConfigError
from hlatctl.run.journal import number
from hlatctl.run.state import RunState

#: Steps over which the training loss of "now" is averaged: one batch's loss says little.
WINDOW_STEPS = 20
LOSS = "loss"
_VALIDATION = "validation_loss"
_NAME = re.compile(r"(loss|validation_loss|eval\.([\w./-]+))(?:@tokens=(\w[\w.]*))?")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A number that trials are compared by.

    Args:
        name: as it is typed.
        score: its name among an evaluation's scores; empty for the training loss.
        at_tokens: where it is taken; None: at the end.
        minimize: less is better.
    """

    name: str
    score: str
    at_tokens: int | None
    minimize: bool

    def rungs(self, config: Config, parts: int) -> list[int]:
        """Tokens at which a run is compared with the others, the last of them where its value is final.

        Args:
            config: of the run.
            parts: that the training loss is looked at after.
        """
        last = self.at_tokens or config.total_tokens
        if self.score:
            return [tokens for tokens in sorted(config.milestones.values()) if tokens <= last]
        return sorted({math.ceil(last * part / parts) for part in range(1, parts + 1)})

    def values(self, state: RunState, rungs: list[int]) -> dict[int, float]:
        """The objective by tokens, at the rungs that the run has reached; NaN where it is no number."""
        if not self.score:
            return _losses(state, rungs)
        found = {
            tokens: state.milestones[tokens].scores.get(self.score) for tokens in rungs if tokens in state.milestones
        }
        return {tokens: number(score, "value") for tokens, score in found.items() if score is not None}


def objective(settings: SweepConfig, config: Config) -> Objective:
    """The objective that a sweep's settings name, checked against one of its runs.

    Raises:
        ConfigError: there is none of that name, or no run reports it.
    """
    name = settings.objective or (_VALIDATION if config.eval.enabled else LOSS)
    match = _NAME.fullmatch(name)
    if not match:
        raise ConfigError(
            f"sweep.objective={name}: not known",
            hint="loss, validation_loss, eval.TASK, each with @tokens=N for the value there",
        )
    kind, task, at = match.groups()
    at_tokens = None if at is None else token_count(at, "sweep.objective@tokens")
    found = Objective(
        name=name,
        score="" if kind == LOSS else task or _VALIDATION,
        at_tokens=at_tokens,
        minimize=(settings.direction or ("max" if task and not task.startswith("validation") else "min")) == "min",
    )
    check(found, config)
    return found


def check(found: Objective, config: Config) -> None:
    """Refuse an objective that a run of this configuration does not report.

    Raises:
        ConfigError: it is not evaluated, or not at these tokens.
    """
    if found.score and not config.eval.enabled:
        raise ConfigError(
            f"sweep.objective={found.name}: no trial reports it, for eval.enabled=false",
            hint="sweep.objective=loss, or eval.enabled=true",
        )
    at = found.at_tokens
    if at is None:
        return
    if not found.score and at > config.total_tokens:
        raise ConfigError(
            f"sweep.objective={found.name}: no trial reports it, they end at {config.total_tokens:,} tokens"
        )
    if found.score and at not in config.milestones.values():
        raise ConfigError(
            f"sweep.objective={found.name}: no trial reports it, there is no milestone of {at:,} tokens",
            hint=f"milestones: {', '.join(map(str, config.milestones.values()))}; eval.every_tokens sets them",
        )


def _losses(state: RunState, rungs: list[int]) -> dict[int, float]:
    """Mean training loss of the last steps before each rung that has been reached."""
    steps = sorted(state.steps)
    tokens = [int(state.steps[step]["tokens"]) for step in steps]
    found = {}
    for rung in rungs:
        reached = next((index for index, at in enumerate(tokens) if at >= rung), None)
        if reached is None:
            break
        window = [number(state.steps[step], "loss") for step in steps[max(0, reached + 1 - WINDOW_STEPS) : reached + 1]]
        found[rung] = math.fsum(window) / len(window) if all(map(math.isfinite, window)) else math.nan
    return found
