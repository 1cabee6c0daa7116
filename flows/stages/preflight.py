"""Preflight: measure every worker before training starts, and record the results in the node ledger."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import Any

from conf import fingerprint
from flows.launch.base import Job
from flows.recovery import node_ledger
from flows.runtime.amended import config_words
from flows.runtime.context import FlowContext
from flows.runtime.jobs import run_job
from flows.stages import run_stage
from flows.stages.compile import cache_env, local_cache
from hlatctl.run import files
from hlatctl.run.errors import PreflightError
from hlatctl.run.files import reading
from hlatctl.run.provenance import versions_of
from hlatctl.run.state import NO_SPARE_NODE

_JOB = "preflight"
#: Seconds between two measurements of a run that waits for nodes.
_LEAST_WAIT_S = 1.0
#: Maximum number of hosts that a message about a difference or a wait names.
_MOST_NAMED = 4


def preflight(ctx: FlowContext) -> None:
    """Measure every worker, on spare nodes too; a host that fails is replaced by a spare one.

    If there is no spare one, a run that has trained before waits. If a scheduler keeps nodes for the run, training runs
    on the nodes that are measured here.

    Raises:
        PreflightError: names the worker and the measurement.
        StoppedError: the run was asked to stop.
    """

    def work() -> dict[str, Any]:
        left_out = _fit_nodes(ctx)
        with reading(ctx.run.preflight):
            record = files.read_json(ctx.run.preflight)
        workers, differences = record["workers"], _differences(ctx, record["workers"])
        for text in (*differences, *record["unchecked"]):
            ctx.message(f"preflight: {text}")
        return {
            "workers": len(workers),
            "left_out_hosts": list(left_out),
            "software_differences": differences,
            "allocation": _kept(ctx),
        }

    def done() -> str:
        # A driver that takes over a running attempt must not slow it down, nor measure busy nodes.
        return "training is running on the nodes" if ctx.training_lives() else ""

    run_stage(ctx, "preflight", fingerprint.hardware_fingerprint(ctx.config), work, done=done)


def is_due(ctx: FlowContext, job: Job) -> bool:
    """Return whether a job would run on other nodes of the scheduler than those that were measured last."""
    if not ctx.launcher.keeps_nodes:
        return False
    kept, measured = ctx.launcher.allocation(job), ctx.state.stages.get("preflight")
    return not (kept and measured and measured.outputs.get("allocation") == kept.name)


def _job(ctx: FlowContext) -> Job:
    argv = ("-m", "trainer.preflight", "--run-dir", os.fspath(ctx.run.root), *config_words(ctx))
    # The environment of training, which then has nothing to import.
    env = cache_env(ctx.config, local_cache(ctx.config)) if ctx.config.backend.compile else {}
    job = ctx.job(_JOB, *argv, distributed=True, env=env)
    # Without spare ones, the nodes that are kept can be more than the run's: another run passed them on.
    all_nodes, hands_on = ctx.config.cluster.spare_nodes > 0, job.shared_modules and hands_over(ctx)
    return dataclasses.replace(job, all_nodes=all_nodes, stays="passed" if hands_on else "")


def hands_over(ctx: FlowContext) -> bool:
    """Return whether a job may take over what the job before has imported.

    That may be the reason why an attempt made no step.
    """
    newest = ctx.state.attempt
    return newest is None or newest.last_step > 0


def _kept(ctx: FlowContext) -> str:
    kept = ctx.launcher.allocation(_job(ctx))
    return kept.name if kept else ""


def _fit_nodes(ctx: FlowContext) -> tuple[str, ...]:
    """Measure until all nodes are fit, replacing others by spare ones; return the hosts that are left out."""
    failed: set[str] = set()
    waits = _Waits(ctx)
    while True:
        placement = ctx.nodes.place()
        if placement.message:
            ctx.message(f"nodes: {placement.message}")
        try:
            _measure(ctx)
            return placement.left_out
        except PreflightError as error:
            newly = ctx.nodes.rejected().difference(placement.left_out)
            failed |= newly
            if newly and failed.issubset(ctx.nodes.place().left_out):
                ctx.message(f"preflight: {error.message}; measuring again with another node")
            elif waits.may_wait(newly):
                waits.wait(failed, error)
                failed.clear()
            else:
                raise  # no host is at fault, or there is no spare one


class _Waits:
    """Waits for nodes to be repaired. The run is queued in the meantime, so it holds no nodes."""

    def __init__(self, ctx: FlowContext) -> None:
        self._ctx, self._since_s, self._waited = ctx, ctx.clock.monotonic_s(), False

    def may_wait(self, unfit: set[str]) -> bool:
        """Return whether a run waits: it trained on these nodes before, only a few are unfit, and it has time."""
        config = self._ctx.config
        has_trained = config.recovery.enabled and any(a.last_step for a in self._ctx.state.attempts)
        # If most nodes fail, the reason is something they have in common.
        few = 0 < len(unfit) <= config.cluster.nodes / 2 and config.cluster.nodes > 1
        waited_s = self._ctx.clock.monotonic_s() - self._since_s
        return has_trained and few and waited_s < config.recovery.max_node_wait_s

    def wait(self, unfit: set[str], error: PreflightError) -> None:
        interval_s = max(_LEAST_WAIT_S, self._ctx.config.recovery.max_backoff_s)
        reason = f"{', '.join(sorted(unfit)[:_MOST_NAMED])}: not fit to train, and no spare node"
        if not self._waited:
            self._ctx.message(f"preflight: {error.message}; no spare node, measuring again every {interval_s:g} s")
        self._waited = True
        self._ctx.launcher.release(self._ctx.run.root)
        self._ctx.event("job_queued", job=_JOB, reason=reason, code=NO_SPARE_NODE, expected_start_unix_s=None)
        self._ctx.pause(interval_s)
        self._ctx.event("job_left_queue", job=_JOB)


def _measure(ctx: FlowContext) -> None:
    ctx.run.preflight.unlink(missing_ok=True)
    shutil.rmtree(ctx.run.preflight_nodes, ignore_errors=True)
    try:
        run_job(ctx, _job(ctx), timeout_s=ctx.config.preflight.timeout_s, timeout_key="preflight.timeout_s")
    finally:
        _record(ctx)


def _differences(ctx: FlowContext, workers: list[dict[str, Any]]) -> list[str]:
    """Return how the software of nodes differs from what this run's driver recorded, one sentence per difference."""
    with reading(ctx.run.provenance):
        driver = versions_of(files.read_json(ctx.run.provenance) if ctx.run.provenance.is_file() else {})
    hosts: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        for name, version in worker.get("versions", {}).items():
            if driver.get(name) and version != driver[name]:
                hosts.setdefault((name, version), []).append(worker["host"])
    return [
        f"{', '.join(names[:_MOST_NAMED])}{f' and {more} more' if (more := len(names) - _MOST_NAMED) > 0 else ''}: "
        f"{name} {version}, but the run's provenance.json has {driver[name]}"
        for (name, version), names in sorted(hosts.items())
    ]


def _record(ctx: FlowContext) -> None:
    """Record each host's result in the node ledger; a job that died has none."""
    if not ctx.run.preflight.is_file():
        return
    failures: dict[str, list[str]] = {}
    with reading(ctx.run.preflight):
        for worker in files.read_json(ctx.run.preflight)["workers"]:
            failures.setdefault(worker["host"], []).extend(worker["failures"])
    passed = [host for host, texts in failures.items() if not texts]
    # At 2,048 nodes, a line for each of them at every preflight would make the ledger slow to read.
    ctx.hold_against(node_ledger.newly_passed(node_ledger.read(ctx.ledger), passed), "preflight_passed", "")
    for host, texts in failures.items():
        if texts:
            ctx.hold_against([host], "preflight_failed", "; ".join(texts))
