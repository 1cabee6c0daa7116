"""What a submission would cost, whether a person must confirm it, and the budget at which a run stops.

The predicted time of a step is that of an earlier run with the same shapes and number of processes. If there is none,
``hlatctl.plan`` predicts it from the hardware and the cluster's speed test. What a run has used so far is counted in
one place, ``hlatctl.report.numbers``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from conf.fingerprint import graph_fingerprint
from conf.of_run import of_run
from conf.schema import ClusterConfig, Config
from hlatctl.plan.budget import Cost, cost
from hlatctl.plan.evaluation import evaluation_cost
from hlatctl.plan.step_time import step_time_s
from hlatctl.report.numbers import cost_usd, node_hours
from hlatctl.run.errors import BudgetError, HlatctlError
from hlatctl.run.fold import read_state
from hlatctl.run.pace import median_s
from hlatctl.run.runs import list_runs
from hlatctl.run.state import RunState

#: Maximum number of earlier runs to read, newest first.
_MOST_RUNS = 50
#: A median over fewer steps is not representative, because the first step compiles.
_LEAST_STEPS = 10
#: Share of a budget at which people get a message.
_WARN_FRACTION = 0.9
_SET_PRICE = "set cluster.price_usd_per_node_hour"


class Pace:
    """Median step times of earlier runs, by shapes, batch size and number of processes."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs = list_runs(runs_dir)[::-1][:_MOST_RUNS]
        self._known: dict[tuple[str, int, int], float | None] = {}
        self._configs: list[tuple[int, Config]] | None = None

    def step_s(self, config: Config) -> float | None:
        """Return the seconds of a step; None if there is no such earlier run."""
        if config.cluster.jobs_run == "nowhere":
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
                if config.cluster.jobs_run != "nowhere":
                    self._configs.append((index, config))
        return self._configs


def planned_step_s(config: Config) -> float | None:
    """Return the seconds of a step as `hlatctl plan` shows them, with the cluster's speed test; None if unknown."""
    from hlatctl.plan.calibration import calibrated  # late: drivers import this module, and predict nothing

    return step_time_s(calibrated(config)[0])


def _shape(config: Config) -> tuple[str, int, int]:
    return graph_fingerprint(config, {}), config.train.global_batch_size, config.world_size


@dataclass(frozen=True, kw_only=True)
class Expense:
    """What a submission takes at most, if nothing breaks.

    Args:
        node_hours: None if the time of a step is unknown.
        usd: None if that or the price of a node is unknown.
        priced: the nodes have a price.
    """

    node_hours: float | None = None
    usd: float | None = None
    priced: bool = False

    def why_ask(self, cluster: ClusterConfig, what: str) -> str:
        """Return why a person must confirm the submission; empty: it needs no confirmation."""
        usd, hours = cluster.confirm_above_usd, cluster.confirm_above_node_hours
        if self.priced and self.usd is None:
            return f"cluster.confirm_above_usd={usd:g}: {what} has an unknown cost"
        if self.usd is not None and self.usd > usd:
            return f"cluster.confirm_above_usd={usd:g}: {what} costs {self.usd:,.2f} USD"
        if self.node_hours is not None and self.node_hours > hours:
            return f"cluster.confirm_above_node_hours={hours:g}: {what} takes {self.node_hours:,.0f} node-hours"
        return ""

    def text(self) -> str:
        """Return the expense in words, and which keys are missing for it."""
        hours = f"{self.node_hours:,.3g} node-hours" if self.node_hours is not None else ""
        if self.usd is not None:
            return f"{hours}, {self.usd:,.2f} USD"
        if hours:
            return f"{hours}; the dollars are unknown: {_SET_PRICE}"
        how = "`hlatctl plan` names the keys that it needs"
        return f"unknown: {how}" + ("" if self.priced else f"; {_SET_PRICE} for dollars")


def total(costs: Iterable[Cost | None], *, times: float = 1.0, priced: bool) -> Expense:
    """Return the expense of several trainings, of which each is repeated ``times``; None among them: unknown."""
    known = list(costs)
    if None in known:
        return Expense(priced=priced)
    hours = times * sum(one.node_hours for one in known if one)
    usd = [one.usd for one in known if one and one.usd is not None]
    return Expense(node_hours=hours, usd=times * sum(usd) if len(usd) == len(known) else None, priced=priced)


def of_training(config: Config, *, done: int = 0) -> Expense:
    """Return the expense of training to the last step, from the step after ``done``; nothing on this machine for free.

    Earlier runs are read only where nodes have a price or come from a scheduler.
    """
    cluster = config.cluster
    priced = bool(cluster.price_usd_per_node_hour)
    if not priced and cluster.jobs_run != "cluster":
        return Expense(node_hours=0.0)
    step_s = Pace(Path(config.runs_dir)).step_s(config) or planned_step_s(config)
    steps = max(0, config.total_steps - max(done, config.fork.step))
    return total([None if step_s is None else cost(config, step_s, steps=steps)], priced=priced)


def of_evaluations(config: Config, milestones: int) -> Expense:
    """Return the expense of evaluating so many milestones, each as a job of one node at the price of training's."""
    price = config.cluster.price_usd_per_node_hour
    if not price and config.cluster.jobs_run != "cluster":
        return Expense(node_hours=0.0)
    one_s = evaluation_cost(config, None).total_s
    hours = None if one_s is None else milestones * one_s / 3600
    return Expense(node_hours=hours, usd=None if hours is None or not price else hours * price, priced=bool(price))


@dataclass(frozen=True)
class Spent:
    """The part of a budget that a run has used; ``key`` is the budget's key."""

    key: str
    limit: float
    used: float
    unit: str

    @property
    def fraction(self) -> float:
        """Used share of the budget."""
        return self.used / self.limit

    def text(self) -> str:
        """Return it in words."""
        return f"{self.key}={self.limit:g}: {self.used:,.2f} {self.unit} are used, {100 * self.fraction:.0f} %"


def spent(state: RunState, config: Config, now_unix_s: float | None = None) -> list[Spent]:
    """Return what a run has used of each of its budgets; empty without a budget."""
    budget, found = config.budget, []
    if budget.node_hours is not None:
        hours = node_hours(state, config, now_unix_s)
        found.append(Spent("budget.node_hours", budget.node_hours, hours, "node-hours"))
    if budget.usd is not None and (usd := cost_usd(state, config, now_unix_s)) is not None:
        found.append(Spent("budget.usd", budget.usd, usd, "USD"))
    return found


def used_up(run_id: str, state: RunState, config: Config, now_unix_s: float | None = None) -> BudgetError | None:
    """Return the error of a run whose budget is used up; None: it may go on."""
    over = next((one for one in spent(state, config, now_unix_s) if one.used >= one.limit), None)
    if over is None:
        return None
    raise_it = f"`hlatctl resume {run_id} {over.key}=VALUE` continues the run with a larger budget"
    return BudgetError(f"run {run_id}: {over.text()}", hint=raise_it)


def warning(state: RunState, config: Config, now_unix_s: float) -> str:
    """Return a warning about the budget that is nearly used up, once for each budget; else empty."""
    for one in spent(state, config, now_unix_s):
        used = f"{one.key}={one.limit:g}: {100 * _WARN_FRACTION:.0f} % is used"
        text = f"{used}; the run stops with a checkpoint at 100 %"
        if one.fraction >= _WARN_FRACTION and text not in state.warnings:
            return text
    return ""
