"""What a submission would cost, whether a person must confirm it, and the budget at which a run stops.

The predicted time of a step is that of an earlier run with the same shapes and number of processes. If there is none,
or if the command line has numbers of the hardware, ``hlatctl.plan`` predicts it from the hardware and the cluster's
speed test. What a run has used so far is counted in one place, ``hlatctl.report.numbers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from conf.fingerprint import graph_fingerprint
from conf.of_run import of_run
from conf.schema import ClusterConfig, Config
from hlatctl.plan.budget import Cost, cost
from hlatctl.plan.evaluation import evaluation_cost
from hlatctl.plan.step_time import mean_step_s
from hlatctl.report.numbers import cost_usd, node_hours
from hlatctl.run import files
from hlatctl.run.errors import BudgetError, HlatctlError
from hlatctl.run.files import DAMAGED
from hlatctl.run.fold import read_state
from hlatctl.run.pace import median_s
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import list_runs
from hlatctl.run.state import RunState

#: Maximum number of earlier runs to read, newest first.
_MOST_RUNS = 50
#: A median over fewer steps is not representative, because the first step compiles.
_LEAST_STEPS = 10
#: Share of a budget at which people get a message.
_WARN_FRACTION = 0.9
_HARDWARE = "cluster.hardware."
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
                if config.cluster.jobs_run != "nowhere" and not config.train.stages:
                    self._configs.append((index, config))
        return self._configs


def step_time_of(config: Config, pace: Pace, typed: Sequence[str] = ()) -> tuple[float | None, str]:
    """Return the predicted seconds of a step, and what they are from; None if unknown.

    Args:
        typed: overrides of the command line. Numbers of ``cluster.hardware`` among them have priority over earlier runs
            and over the cluster's speed test.
    """
    from hlatctl.plan.calibration import calibrated  # late: drivers import this module, and predict nothing

    own = typed_hardware(typed)
    if not own and not config.stages and (step_s := pace.step_s(config)):  # stages have several speeds
        return step_s, "an earlier run's speed"
    planned, test = calibrated(config, own)
    numbers = [f"cluster.hardware.{name} as given" for name in own]
    numbers += [f"the speed test of {test.date}"] if test and test.fitted else []
    return mean_step_s(planned), f"the plan's speed{' with ' * bool(numbers)}{' and '.join(numbers)}"


def typed_hardware(typed: Sequence[str]) -> list[str]:
    """Return the names of the numbers of ``cluster.hardware`` that overrides set."""
    from conf.origins import overridden_keys  # late: imports Hydra

    keys = (key for text in typed if "hardware" in text for key in overridden_keys(text))
    return [key.removeprefix(_HARDWARE) for key in keys if key.startswith(_HARDWARE)]


def typed_in(run: RunPaths) -> list[str]:
    """Return the overrides of the hardware that a run was created with, without their values; empty if unknown."""
    for path, place in ((run.origins, ()), (run.provenance, ("origins",))):
        with suppress(OSError, *DAMAGED):
            found = files.read_json(path)
            for key in place:
                found = found[key]
            own = (key for key, origin in found["keys"].items() if origin == "command line")
            return [f"{key}=" for key in own if key.startswith(_HARDWARE)]
    return []


def _shape(config: Config) -> tuple[str, int, int]:
    return graph_fingerprint(config, {}), config.train.global_batch_size, config.world_size


@dataclass(frozen=True, kw_only=True)
class Expense:
    """What a submission takes at most, if nothing breaks.

    Args:
        node_hours: None if the time of a step is unknown.
        usd: None if that or the price of a node is unknown.
        priced: the nodes have a price.
        source: what the time of a training's step is from; empty: it isn't one training.
    """

    node_hours: float | None = None
    usd: float | None = None
    priced: bool = False
    source: str = ""

    def why_ask(self, cluster: ClusterConfig, what: str) -> str:
        """Return why a person must confirm the submission; empty: it needs no confirmation."""
        usd, hours = cluster.confirm_above_usd, cluster.confirm_above_node_hours
        if self.priced and self.usd is None:
            return f"cluster.confirm_above_usd={usd:g}: {what} has an unknown cost"
        if self.node_hours is None and cluster.jobs_run == "cluster":
            return f"cluster.confirm_above_node_hours={hours:g}: {what} takes unknown node-hours at an unknown price"
        if self.usd is not None and self.usd > usd:
            return f"cluster.confirm_above_usd={usd:g}: {what} costs {self.usd:,.2f} USD"
        if self.node_hours is not None and self.node_hours > hours:
            return f"cluster.confirm_above_node_hours={hours:g}: {what} takes {self.node_hours:,.0f} node-hours"
        return ""

    @property
    def hint(self) -> str:
        """How to confirm it."""
        if self.node_hours is None and self.source:
            return "pass --yes to confirm, or set budget.node_hours to stop training there"
        return "pass --yes to confirm, or raise the limit in the cluster's configuration"

    def text(self) -> str:
        """Return the expense in words, and which keys are missing for it."""
        if self.node_hours is None:
            how = "unknown: `hlatctl plan` names the keys that it needs"
            return how + ("" if self.priced else f"; no price: {_SET_PRICE} for dollars")
        hours = f"{self.node_hours:,.3g} node-hours"
        usd = f", {self.usd:,.2f} USD" if self.usd is not None else ""
        source = f" ({self.source})" if self.source else ""
        return f"{hours}{usd}{source}" + ("" if usd else f"; no price: {_SET_PRICE} for dollars")


def total(costs: Iterable[Cost | None], *, times: float = 1.0, priced: bool) -> Expense:
    """Return the expense of several trainings, of which each is repeated ``times``; None among them: unknown."""
    known = list(costs)
    if None in known:
        return Expense(priced=priced)
    hours = times * sum(one.node_hours for one in known if one)
    usd = [one.usd for one in known if one and one.usd is not None]
    return Expense(node_hours=hours, usd=times * sum(usd) if len(usd) == len(known) else None, priced=priced)


def of_training(config: Config, *, done: int = 0, typed: Sequence[str] = ()) -> Expense:
    """Return the expense of training to the last step, from the step after ``done``; nothing on this machine for free.

    Earlier runs are read only where nodes have a price or come from a scheduler. The run's budget is an upper bound.

    Args:
        typed: overrides of the command line (:func:`step_time_of`).
    """
    cluster = config.cluster
    priced = bool(cluster.price_usd_per_node_hour)
    if not priced and cluster.jobs_run != "cluster":
        return Expense(node_hours=0.0)
    step_s, source = step_time_of(config, Pace(Path(config.runs_dir)), typed)
    steps = max(0, config.total_steps - max(done, config.fork.step))
    found = total([None if step_s is None else cost(config, step_s, steps=steps)], priced=priced)
    return within_budget(replace(found, source=source), config)


def within_budget(expense: Expense, config: Config) -> Expense:
    """Return an expense, or the whole budget of a configuration if that is less."""
    price, hours, usd = config.cluster.price_usd_per_node_hour, config.budget.node_hours, config.budget.usd
    limits = [*([hours] if hours is not None else []), *([usd / price] if usd is not None and price else [])]
    if not limits or (expense.node_hours is not None and expense.node_hours <= min(limits)):
        return expense
    most = min(limits)
    return replace(expense, node_hours=most, usd=most * price if price else None, source="the whole budget")


def of_several(expenses: Sequence[Expense]) -> Expense:
    """Return the expense of several submissions; unknown if one of them is."""
    hours, usd = [one.node_hours for one in expenses], [one.usd for one in expenses]
    known_hours = [one for one in hours if one is not None]
    known_usd = [one for one in usd if one is not None]
    return Expense(
        node_hours=sum(known_hours) if len(known_hours) == len(hours) else None,
        usd=sum(known_usd) if len(known_usd) == len(usd) else None,
        priced=any(one.priced for one in expenses),
        source=", ".join(dict.fromkeys(one.source for one in expenses)),
    )


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
