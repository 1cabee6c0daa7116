"""Predicts what a sweep takes: trials, hours and dollars.

The time of a step is that of an earlier run with the same shapes and number of processes. If there is none,
``hlatctl.plan`` predicts it from the hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from conf.of_run import of_run
from conf.schema import Config
from conf.space import Space
from flows.stages.compile import graph_key
from hlatctl.plan.cost import cost
from hlatctl.plan.step_time import step_time_s
from hlatctl.run.errors import HlatctlError
from hlatctl.run.fold import read_state
from hlatctl.run.pace import median_s
from hlatctl.run.runs import list_runs
from hlatctl.units import duration

#: Earlier runs that are read, newest first.
_MOST_RUNS = 50
#: A median over fewer steps is not representative: the first one compiles.
_LEAST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep takes at most; trials that are ended early take less.

    Args:
        arms, seeds, trials: how many.
        parallel: trials at once.
        steps, tokens: of all trials.
        wall_s: time of training; None if the time of a step is unknown.
        measured: for every arm, the time of a step was measured by an earlier run.
        process_hours: of all processes; None if the time of a step is unknown.
        usd: of all nodes; None if it can't be predicted.
        priced: the nodes have a price.
    """

    arms: int
    seeds: int
    trials: int
    parallel: int
    steps: int
    tokens: int
    wall_s: float | None
    measured: bool
    process_hours: float | None
    usd: float | None
    priced: bool

    def text(self) -> str:
        """Return the plan as one sentence."""
        seeds = f" x {self.seeds} seeds" if self.seeds > 1 else ""
        took = "time unknown: no earlier run has these shapes, and cluster.hardware is incomplete"
        if self.wall_s is not None and self.process_hours is not None:
            source = "measured by an earlier run" if self.measured else "predicted"
            took = f"at most {duration(self.wall_s)} of training, {self.process_hours:.2g} process-hours, {source}"
        dollars = f", {self.usd:,.2f} USD" if self.usd is not None else ", cost unknown" if self.priced else ""
        return (
            f"{self.trials} trials ({self.arms} arms{seeds}), {self.parallel} at once: {self.steps:,} steps, "
            f"{self.tokens:,} tokens; {took}{dollars}"
        )


def plan(space: Space, arms: Iterable[Config], runs_dir: Path) -> Plan:
    """Predict what a sweep takes.

    Args:
        space: of the sweep.
        arms: the configuration of each known arm; a single one represents all arms if they are drawn later.
        runs_dir: the folder of the earlier runs.
    """
    known, pace = list(arms), _Pace(runs_dir)
    each = space.trials / len(known)
    measured = [pace.step_s(config) for config in known]
    step_times = [step_s or step_time_s(config) for step_s, config in zip(measured, known, strict=True)]
    costs = [cost(config, step_s) for step_s, config in zip(step_times, known, strict=True) if step_s is not None]
    complete = len(costs) == len(known)
    days = sum(one.days for one in costs)
    usd = [one.usd for one in costs if one.usd is not None]
    return Plan(
        arms=space.arms,
        seeds=space.settings.seeds,
        trials=space.trials,
        parallel=space.settings.parallel,
        steps=round(each * sum(config.total_steps for config in known)),
        tokens=round(each * sum(config.total_tokens for config in known)),
        wall_s=each * days * 86400 / space.settings.parallel if complete else None,
        measured=all(measured),
        process_hours=each * sum(one.accelerator_hours for one in costs) if complete else None,
        usd=each * sum(usd) if len(usd) == len(known) else None,
        priced=any(config.cluster.price_usd_per_node_hour for config in known),
    )


class _Pace:
    """Median step times of earlier runs, by shapes, batch size and number of processes."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs = list_runs(runs_dir)[::-1][:_MOST_RUNS]
        self._known: dict[tuple[str, int, int], float | None] = {}
        self._configs: list[tuple[int, Config]] | None = None

    def step_s(self, config: Config) -> float | None:
        """Return the seconds of a step; None if there is no such earlier run."""
        if config.cluster.launcher == "mock":
            return None
        key = _shape(config)
        if key not in self._known:
            alike = (self._runs[index] for index, other in self._read() if _shape(other) == key)
            paces = (median_s(read_state(run).steps.columns("step_s")[0], least=_LEAST_STEPS) for run in alike)
            self._known[key] = next((pace for pace in paces if pace), None)
        return self._known[key]

    def _read(self) -> list[tuple[int, Config]]:
        if self._configs is None:
            self._configs = []
            for index, run in enumerate(self._runs):
                try:
                    config = of_run(run)
                except HlatctlError:
                    continue  # `hlatctl runs` reports damaged runs
                if config.cluster.launcher != "mock":
                    self._configs.append((index, config))
        return self._configs


def _shape(config: Config) -> tuple[str, int, int]:
    return graph_key(config), config.train.global_batch_size, config.world_size
