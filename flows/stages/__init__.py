"""The stages of the flow: plain functions that don't depend on Prefect.

A stage is idempotent and has a fingerprint of everything that it depends on. If it is done, it is skipped with a
``stage_skipped`` event. Only ``run_stage`` journals the events of stages. Stages with jobs have a file each. This file
has the two that only record: the run's provenance before any work, and its report.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hlatctl
from conf.fingerprint import config_fingerprint
from conf.registries import BACKENDS, LAUNCHERS, OPTIMIZERS, SCHEDULES
from conf.schema import Config
from flows.recovery import policy
from flows.runtime.context import FlowContext
from hlatctl.run import files, provenance
from hlatctl.run.checkpoint import MANIFEST, read_manifest
from hlatctl.run.errors import HlatctlError, LaunchError, storage_errors, to_record
from hlatctl.run.files import reading
from hlatctl.run.paths import RunPaths


def run_stage(
    ctx: FlowContext,
    name: str,
    fingerprint: str,
    work: Callable[[], dict[str, Any]],
    *,
    done: Callable[[], str] = lambda: "",
) -> None:
    """Run a stage unless it is done, and restart it if the restart policy of jobs says so (``recovery.*``).

    Args:
        fingerprint: of everything that the work depends on.
        work: returns the stage's outputs, as JSON values.
        done: returns why the stage is done; empty: it isn't.
    """
    why = done()
    if why:
        ctx.event("stage_skipped", stage=name, fingerprint=fingerprint, why=why)
        ctx.message(f"{name}: skipped, {why}")
        ctx.watch()
        return
    ctx.event("stage_started", stage=name, fingerprint=fingerprint)
    ctx.watch()
    start = ctx.clock.monotonic_s()
    outputs = _do(ctx, name, fingerprint, work)
    wall_s = ctx.clock.monotonic_s() - start
    ctx.event("stage_finished", stage=name, fingerprint=fingerprint, wall_s=round(wall_s, 3), outputs=outputs)
    ctx.message(f"{name}: done in {wall_s:.1f} s")
    ctx.watch()


def _do(ctx: FlowContext, name: str, fingerprint: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do the work until it succeeds or must not be restarted; journal each failure."""
    ends: list[LaunchError] = []
    while True:
        try:
            with storage_errors():
                return work()
        except HlatctlError as error:
            decision = None
            if isinstance(error, LaunchError) and error.code:
                ends.append(error)
                decision = policy.decide_job(ends, ctx.config.recovery)
                error.message = f"{error.message}; {decision.why}"
            restart = decision is not None and decision.action == "restart"
            fields: dict[str, Any] = to_record(error)
            fields["error"] = fields.pop("type")
            ctx.event("stage_failed", stage=name, fingerprint=fingerprint, restart=restart, **fields)
            if decision is None or not restart:
                raise
            ctx.message(f"{name}: {error.message}" + (f" in {decision.wait_s:g} s" if decision.wait_s else ""))
        ctx.pause(decision.wait_s)
        ctx.event("stage_started", stage=name, fingerprint=fingerprint)


def record_provenance(ctx: FlowContext, argv: list[str]) -> None:
    """Write ``provenance.json`` once."""

    def work() -> dict[str, Any]:
        record = provenance.collect(argv, Path(hlatctl.__file__).parent)
        record["packages"] |= _foreign(ctx.config)
        record["config_fingerprint"] = config_fingerprint(ctx.config)
        record["simulated"] = ctx.state.simulated
        record["initial_weights"] = _initial_weights(ctx.config)
        record["fork"] = _fork(ctx.config, ctx.run)
        record["origins"] = _origins(ctx.run)
        files.write_json(ctx.run.provenance, record)
        ctx.run.origins.unlink(missing_ok=True)
        return {"commit": (record["git"] or {}).get("commit")}

    def done() -> str:
        return "recorded when the run was created" if ctx.run.provenance.is_file() else ""

    run_stage(ctx, "provenance", config_fingerprint(ctx.config), work, done=done)


def _foreign(config: Config) -> dict[str, str]:
    """Return the versions of packages that add a launcher, a backend or another part of the run."""
    return {
        **LAUNCHERS.package(config.cluster.launcher),
        **BACKENDS.package(config.backend.name),
        **OPTIMIZERS.package(config.optimizer.name),
        **SCHEDULES.package(config.optimizer.schedule),
    }


def _initial_weights(config: Config) -> dict[str, str] | None:
    if config.train.init_from is None:
        return None
    manifest = Path(config.train.init_from) / MANIFEST
    return {"path": config.train.init_from, "manifest_sha256": files.sha256_file(manifest)}


def _origins(run: RunPaths) -> dict[str, Any] | None:
    """Return where the configuration's values came from; None: unknown, as for trials and forks."""
    with suppress(OSError, ValueError):
        return dict(files.read_json(run.origins))
    return None


def _fork(config: Config, run: RunPaths) -> dict[str, Any] | None:
    if config.fork.run is None:
        return None
    return {**asdict(config.fork), "manifest_sha256": read_manifest(run.checkpoint(config.fork.step)).sha256}


def add_data_fingerprints(ctx: FlowContext, dataset: dict[str, Any]) -> None:
    """Add the fingerprints of corpus and tokenizer to ``provenance.json``."""
    hint = f"move it away; `hlatctl resume {ctx.run.run_id}` records it again"
    with reading(ctx.run.provenance, hint=hint):
        record = dict(files.read_json(ctx.run.provenance))
    record["dataset_fingerprint"] = dataset["fingerprint"]
    record["tokenizer_fingerprint"] = dataset["tokenizer"]["fingerprint"]
    files.write_json(ctx.run.provenance, record)


_REPORT, _FINISHED = "report", "finished"


def write_report(ctx: FlowContext) -> None:
    """Build the run's report."""
    from hlatctl.report.build import build

    def work() -> dict[str, Any]:
        return {"page": os.fspath(build(ctx.run))}

    run_stage(ctx, _REPORT, config_fingerprint(ctx.config), work)


def finish_report(ctx: FlowContext) -> None:
    """Rebuild the report after the run's last event, so that it says "finished" and has the final numbers.

    A run whose stage wrote no report, such as a simulated trial of a sweep, gets none here. An error must not fail the
    run.
    """
    from hlatctl.report.build import build

    stage = ctx.refresh().stages.get(_REPORT)
    if stage is None or stage.status != _FINISHED:
        return
    try:
        build(ctx.run, redraws=False)
    except HlatctlError as error:
        ctx.message(f"the report lacks the run's last event: {error.message}")
