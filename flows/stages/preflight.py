"""Preflight: measure every worker before training starts, and record the results in the node ledger."""

from __future__ import annotations

import os
import shutil
from typing import Any

from conf import fingerprint
from flows.runtime.context import FlowContext
from flows.runtime.jobs import run_job
from flows.stages import run_stage
from hlatctl.run import files
from hlatctl.run.errors import PreflightError
from hlatctl.run.provenance import versions_of
from hlatctl.run.reading import reading

#: Hosts of one difference that are named.
_MOST_NAMED = 4


def preflight(ctx: FlowContext) -> None:
    """Measure every worker; a host that fails is replaced by a spare one, if there is one.

    Raises:
        PreflightError: names the worker and the measure.
    """

    def work() -> dict[str, Any]:
        failed: set[str] = set()
        while True:
            placement = ctx.place()
            if placement.message:
                ctx.message(f"nodes: {placement.message}")
            try:
                _measure(ctx)
            except PreflightError as error:
                newly = ctx.rejected_hosts().difference(placement.left_out)
                failed |= newly
                if not newly or not failed.issubset(ctx.place().left_out):
                    raise  # no host is at fault, or there is no spare one
                ctx.message(f"preflight: {error.message}; measuring again with another node")
                continue
            with reading(ctx.run.preflight):
                workers = files.read_json(ctx.run.preflight)["workers"]
            differences = _differences(ctx, workers)
            for difference in differences:
                ctx.message(f"preflight: {difference}")
            return {
                "workers": len(workers),
                "left_out_hosts": list(placement.left_out),
                "software_differences": differences,
            }

    def done() -> str:
        # A driver that takes over a running attempt must not slow it down, nor measure busy nodes.
        return "training is running on the nodes" if ctx.training_lives() else ""

    run_stage(ctx, "preflight", fingerprint.hardware_fingerprint(ctx.config), work, done=done)


def _measure(ctx: FlowContext) -> None:
    ctx.run.preflight.unlink(missing_ok=True)
    shutil.rmtree(ctx.run.preflight_nodes, ignore_errors=True)
    job = ctx.job("preflight", "-m", "trainer.preflight", "--run-dir", os.fspath(ctx.run.root), distributed=True)
    try:
        run_job(ctx, job, timeout_s=ctx.config.preflight.timeout_s, timeout_key="preflight.timeout_s")
    finally:
        _record(ctx)


def _differences(ctx: FlowContext, workers: list[dict[str, Any]]) -> list[str]:
    """Return how the software of nodes differs from what this run's driver recorded, a sentence per difference."""
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
    ctx.hold_against([host for host, texts in failures.items() if not texts], "preflight_passed", "")
    for host, texts in failures.items():
        if texts:
            ctx.hold_against([host], "preflight_failed", "; ".join(texts))
