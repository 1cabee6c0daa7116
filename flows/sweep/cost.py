"""What a sweep will take: trials, hours, dollars, as far as that is known before it starts.

How long a step takes is what an earlier run of the same shapes on the same number of processes has measured, or else
what ``hlatctl.plan`` predicts from the hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import conf.load
from conf.schema import Config
from conf.space import Space
from flows.stages.compile import graph_key
from hlatctl.plan.cost import cost
from hlatctl.plan.step_time import step_time_s
from hlatctl.run.errors import HlatctlError
from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.pace import median_step_s
from hlatctl.run.runs import list_runs
from hlatctl.units import duration

#: Earlier runs that are looked at, newest first.
_MOST_RUNS = 50
#: Fewer steps say little of a pace: the first one compiles.
_LEAST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep will take at most: trials that are ended early take less.

    Args:
        arms, seeds, trials: how many.
        steps, tokens: of all trials.
        wall_s: of training, with so many trials at once; None where nothing tells how long a step takes.
        measured: the time a step takes is that of an earlier run, for every arm.
        process_hours: of all processes.
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
        """In one sentence."""
        seeds = f" x {self.seeds} seeds" if self.seeds > 1 else ""
        took = "time unknown: no earlier run has these shapes, and cluster.hardware does not say enough"
        if self.wall_s is not None and self.process_hours is not None:
            whence = "as measured before" if self.measured else "as predicted"
            took = f"at most {duration(self.wall_s)} of training, {self.process_hours:.2g} process-hours, {whence}"
        dollars = f", {self.usd:,.2f} USD" if self.usd is not None else ", cost unknown" if self.priced else ""
        return (
            f"{self.trials} trials ({self.arms} arms{seeds}), {self.parallel} at once: {self.steps:,} steps, "
            f"{self.tokens:,} tokens; {took}{dollars}"
        )


def plan(space: Space, arms: Iterable[Config], runs_dir: Path) -> Plan:
    """The plan of a sweep.

    Args:
        space: of the sweep.
        arms: of each arm that is known its configuration; one stands for all where they are drawn.
        runs_dir: of the earlier runs.
    """
    known, pace = list(arms), _Pace(runs_dir)
    each = space.trials / len(known)
    measured = [pace.step_s(config) for config in known]
    paces = [found or step_time_s(config) for found, config in zip(measured, known, strict=True)]
    told = [(cost(config, step_s), config) for step_s, config in zip(paces, known, strict=True) if step_s is not None]
    complete = len(told) == len(known)
    days = sum(found.days for found, _ in told)
    usd = [found.usd for found, _ in told if found.usd is not None]
    return Plan(
        arms=space.arms,
        seeds=space.settings.seeds,
        trials=space.trials,
        parallel=space.settings.parallel,
        steps=round(each * sum(config.total_steps for config in known)),
        tokens=round(each * sum(config.total_tokens for config in known)),
        wall_s=each * days * 86400 / space.settings.parallel if complete else None,
        measured=all(measured),
        process_hours=each * sum(found.accelerator_hours for found, _ in told) if complete else None,
        usd=each * sum(usd) if len(usd) == len(known) else None,
        priced=any(config.cluster.price_usd_per_node_hour for config in known),
    )


class _Pace:
    """Median step times of earlier runs, by what they depend on."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs = list_runs(runs_dir)[::-1][:_MOST_RUNS]
        self._known: dict[tuple[str, int, int], float | None] = {}
        self._configs: list[tuple[int, Config]] | None = None

    def step_s(self, config: Config) -> float | None:
        """Seconds a step, or None if no earlier run tells."""
        if config.cluster.launcher == "mock":
            return None
        key = _shape(config)
        if key not in self._known:
            alike = (self._runs[index] for index, other in self._read() if _shape(other) == key)
            paces = (median_step_s(fold(read_events(run)).steps.values(), least=_LEAST_STEPS) for run in alike)
            self._known[key] = next((pace for pace in paces if pace), None)
        return self._known[key]

    def _read(self) -> list[tuple[int, Config]]:
        if self._configs is None:
            self._configs = []
            for index, run in enumerate(self._runs):
                try:
                    config = conf.load.load(run.config)
                except HlatctlError:
                    continue  # a damaged run tells nothing; `hlatctl runs` tells of it
                if config.cluster.launcher != "mock":
                    self._configs.append((index, config))
        return self._configs


def _shape(config: Config) -> tuple[str, int, int]:
    return graph_key(config), config.train.global_batch_size, config.world_size
