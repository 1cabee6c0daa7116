"""Trains a few steps of a configuration on one, two and all of its nodes, and compares their speed with the plan.

Each is an ordinary run without evaluations, so a node that fails its preflight is named and a job that waits is shown.
The run on all nodes is the first one. Where a scheduler keeps a run's nodes, the smaller runs get them from it, so the
test waits in the queue once.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from conf.schema import BudgetConfig, Config, SimulationConfig
from conf.sizes import flops_per_token
from flows import pretrain, tidy
from flows.launch.base import launcher_for
from flows.pretrain import PlainCaller
from flows.runtime import spending
from flows.runtime.driver import Observer
from hlatctl.machine_speed import measure
from hlatctl.plan.calibration import Point, SpeedTest, conditions, fit
from hlatctl.plan.sections import measured
from hlatctl.plan.step_time import peak_flops_per_s, step_time_s
from hlatctl.run.errors import TrainingError
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths

#: Steps at the beginning that warm up: compilation, memory pools, connections.
WARM_UP_STEPS = 5
#: Measurements of exchanges in ``preflight.json``.
_EXCHANGES = ("allreduce_mib_per_s", "gpu_node_gib_per_s", "gpu_nodes_gib_per_s")


def sizes(nodes: int) -> list[int]:
    """Return the numbers of nodes to test: one, two and all."""
    return sorted({1, min(2, nodes), nodes})


def overrides_for(config: Config, nodes: int, steps: int) -> list[str] | None:
    """Return the overrides that shrink a configuration to some nodes; None if its batch isn't divisible."""
    batch, rest = divmod(config.train.global_batch_size * nodes, config.cluster.nodes)
    if rest:
        return None
    return [
        f"cluster.nodes={nodes}",
        "cluster.spare_nodes=0",
        f"train.global_batch_size={batch}",
        f"train.max_steps={steps}",
        f"checkpoint.every_steps={10 * steps}",
        "eval.enabled=false",
        "tracking=none",
        "experiment_name=speedtest",
    ]


def measure_speed(
    configs: Sequence[Config],
    *,
    argv: list[str],
    observer: Observer | None = None,
    simulated: SimulationConfig | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SpeedTest:
    """Run each configuration to its end, most nodes first, and return what was measured.

    Their checkpoints are removed. A budget holds for all of them together.

    Args:
        configs: configurations of :func:`overrides_for`, fewest nodes first.

    Raises:
        HlatctlError: a run failed, was stopped, or could not start.
    """
    points: list[Point] = []
    fits = []
    last, before = configs[-1], None
    budget, launcher = last.budget, launcher_for(last)
    try:
        for each in reversed(configs):
            held = _held(each, last).cluster.paid_nodes / each.cluster.nodes
            config = replace(each, budget=_times(budget, 1 / held))
            run = pretrain.create(config, argv=argv, simulated=simulated)
            if before:
                launcher.pass_on(before.root, run.root)
            before = run
            say(f"{config.cluster.nodes} of {config.cluster.name}: run {run.run_id}")
            pretrain.drive(
                run, observer, caller_of=lambda ctx: PlainCaller(ctx.clock), keeps_nodes=each is not configs[0]
            )
            budget = _times(_rest_of(run, config), held)
            planned, _ = measured(config, measure)
            point = _point(run, planned)
            tidy.archive(run, keeps=None, by="speedtest")
            points.insert(0, point)
            fits.append((planned, point.step_s))
    finally:
        if before:
            launcher.release(before.root)
    return SpeedTest(
        cluster=last.cluster.name,
        unix_s=time.time(),
        conditions=conditions(last),
        model=last.model.name,
        points=points,
        fitted=fit(fits),
    )


def expense(configs: Sequence[Config], typed: Sequence[str]) -> spending.Expense:
    """Return what the runs cost together, at most their common budget."""
    largest = configs[-1]
    free = [replace(_held(each, largest), budget=BudgetConfig()) for each in configs]
    return spending.within_budget(
        spending.of_several([spending.of_training(each, typed=typed) for each in free]), largest
    )


def _held(config: Config, largest: Config) -> Config:
    """Return a run's configuration with the nodes that it pays for: where nodes are kept, it holds all of them."""
    more = largest.cluster.nodes - config.cluster.nodes if launcher_for(config).keeps_nodes else 0
    return replace(config, cluster=replace(config.cluster, spare_nodes=more))


def _times(budget: BudgetConfig, factor: float) -> BudgetConfig:
    """Return a multiple of a budget: a run counts its own nodes, and holds more."""
    limits = {"usd": budget.usd, "node_hours": budget.node_hours}
    return replace(budget, **{name: limit * factor for name, limit in limits.items() if limit is not None})


def _rest_of(run: RunPaths, config: Config) -> BudgetConfig:
    """Return what a run has left of its budget; never nothing, so that the next run stops at its start."""
    rest = {
        one.key.removeprefix("budget."): max(1e-9, one.limit - one.used)
        for one in spending.spent(read_state(run), config)
    }
    return replace(config.budget, **rest)


def _point(run: RunPaths, planned: Config) -> Point:
    steps, rates = read_state(run).steps.columns("step", "tokens_per_s")
    warm = [rate for step, rate in zip(steps, rates, strict=True) if step and rate and step > WARM_UP_STEPS]
    if not warm:
        raise TrainingError(
            f"run {run.run_id}: has no step after the first {WARM_UP_STEPS}", hint=f"hlatctl logs {run.run_id}"
        )
    tokens_per_s = statistics.median(warm)
    step_s, peak, plan_s = planned.tokens_per_step / tokens_per_s, peak_flops_per_s(planned), step_time_s(planned)
    try:
        workers = json.loads(run.preflight.read_text(encoding="utf-8"))["workers"]
    except (OSError, ValueError, KeyError):
        workers = []
    exchanges = {}
    if planned.world_size > 1 and workers:  # one process exchanges nothing
        exchanges = {name: min(w[name] for w in workers) for name in _EXCHANGES if all(name in w for w in workers)}
    return Point(
        nodes=planned.cluster.nodes,
        devices=planned.world_size,
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        mfu_fraction=tokens_per_s * flops_per_token(planned.model, planned.train.seq_len) / peak if peak else None,
        planned_tokens_per_s=planned.tokens_per_step / plan_s if plan_s else None,
        exchanges=exchanges,
    )
