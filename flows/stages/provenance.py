"""Provenance: record the run's code, configuration and environment before any work."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hlatctl
from conf import fingerprint
from conf.registries import BACKENDS, LAUNCHERS, OPTIMIZERS, SCHEDULES
from conf.schema import Config
from flows.runtime.context import FlowContext
from flows.stages import run_stage
from hlatctl.run import files, provenance
from hlatctl.run.checkpoint import MANIFEST, read_manifest
from hlatctl.run.files import reading
from hlatctl.run.paths import RunPaths


def record_provenance(ctx: FlowContext, argv: list[str]) -> None:
    """Write ``provenance.json`` once."""

    def work() -> dict[str, Any]:
        record = provenance.collect(argv, Path(hlatctl.__file__).parent)
        record["packages"] |= _foreign(ctx.config)
        record["config_fingerprint"] = fingerprint.config_fingerprint(ctx.config)
        record["simulated"] = ctx.state.simulated
        record["initial_weights"] = _initial_weights(ctx.config)
        record["fork"] = _fork(ctx.config, ctx.run)
        record["origins"] = _origins(ctx.run)
        files.write_json(ctx.run.provenance, record)
        ctx.run.origins.unlink(missing_ok=True)
        return {"commit": (record["git"] or {}).get("commit")}

    def done() -> str:
        return "recorded when the run was created" if ctx.run.provenance.is_file() else ""

    run_stage(ctx, "provenance", fingerprint.config_fingerprint(ctx.config), work, done=done)


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
