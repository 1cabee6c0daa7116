"""The pace of a run's training and the time that is left, from its newest steps.

The steps of other stages take longer or shorter. How much follows from the plan's step times, or from the FLOPs of a
step if the hardware is unknown. So a time that was measured in one stage counts for the next one, and the time that is
left includes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from conf.sizes import flops_per_token
from hlatctl.plan.step_time import step_time_s
from hlatctl.run.pace import LEAST, measured_steps, median_s
from hlatctl.run.state import RunState
from hlatctl.units import number


def seconds_per_step(state: RunState, config: Config | None) -> float | None:
    """Return the median time of the newest steps, as steps of the newest one's stage. None if unknown."""
    cost_s, costs = _per_cost_s(state, config)
    return cost_s and cost_s * costs[_place(config, state.step)]


def training_left_s(state: RunState, config: Config, to_step: int | None = None) -> float | None:
    """Return the time for the steps up to a step, by default the last one. None if unknown or if no step is left."""
    last = config.total_steps if to_step is None else to_step
    cost_s, costs = _per_cost_s(state, config)
    if not cost_s or last <= state.step:
        return None
    bounds = [(stage.after_step, stage.last_step) for stage in config.stages] or [(0, last)]
    steps = [max(0, min(last, end) - max(state.step, after)) for after, end in bounds]
    return cost_s * sum(number * cost for number, cost in zip(steps, costs, strict=True))


def _per_cost_s(state: RunState, config: Config | None) -> tuple[float | None, Sequence[float]]:
    """Return the median seconds for a step of cost 1, and the cost of a step of each stage."""
    costs = _costs(config) if config else [1.0]
    times_s = (number(event, "step_s") / costs[_place(config, int(event["step"]))] for event in measured_steps(state))
    return median_s(times_s, least=LEAST), costs


def _place(config: Config | None, step: int) -> int:
    stage = config.stage_at(step) if config else None
    return stage.number - 1 if stage else 0


def _costs(config: Config) -> list[float]:
    """Return how long a step of each stage takes, in any unit; 1 for a run without stages."""
    if not config.stages:
        return [1.0]
    configs = [stage.config for stage in config.stages]
    times_s = [step_time_s(one) for one in configs]
    known = [time_s for time_s in times_s if time_s]
    if len(known) == len(times_s):
        return known
    return [float(max(1, flops_per_token(one.model, one.train.seq_len)) * one.tokens_per_step) for one in configs]
