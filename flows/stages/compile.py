"""Compile and warm cache: graphs are compiled once into a shared cache, then brought to every worker's own disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from conf import fingerprint
from conf.devices import DEVICES
from conf.schema import Config
from flows.context import FlowContext, cache_root
from flows.jobs import run_job
from flows.stages import run_stage
from hlatctl.cache.layout import MANIFEST
from hlatctl.run import files
from hlatctl.run.provenance import package_versions

#: Packages whose version enters a compiled graph.
_GRAPH_PACKAGES = ("hlatctl", "torch", "triton")


def graph_key(config: Config) -> str:
    """Fingerprint of the graphs of a configuration with the software installed here."""
    return fingerprint.graph_fingerprint(config, package_versions(_GRAPH_PACKAGES))


def shared_cache(config: Config) -> Path:
    """Where a configuration's graphs are kept for all runs."""
    return cache_root(config) / "compile" / graph_key(config)


def local_cache(config: Config) -> Path:
    """Where they are on each worker's own disk."""
    return Path(config.cluster.worker_cache_dir) / "compile" / graph_key(config)


def compile_graphs(ctx: FlowContext) -> None:
    """Fill the shared cache by a short graph-extraction run of the trainer."""
    key, shared = graph_key(ctx.config), shared_cache(ctx.config)

    def work() -> dict[str, Any]:
        partial = shared.with_name(f".{key}.{ctx.run.run_id}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        job = ctx.job(
            "compile", "-m", "trainer", "--run-dir", os.fspath(ctx.run.root), "--attempt", "0", "--compile-only",
            distributed=True, env=cache_env(ctx.config, partial),
        )  # fmt: skip
        try:
            run_job(ctx, job)
            return _publish(partial, shared)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def done() -> str:
        if not ctx.config.backend.compile:
            return "backend.compile=false"
        return f"compiled before in {shared}" if (shared / MANIFEST).is_file() else ""

    run_stage(ctx, "compile", key, work, done=done)


def warm_cache(ctx: FlowContext) -> None:
    """Bring the shared cache to each worker's own disk, compared as it is copied; note where the trainer finds it."""
    key, shared, local = graph_key(ctx.config), shared_cache(ctx.config), local_cache(ctx.config)

    def work() -> dict[str, Any]:
        places = ("--from", os.fspath(shared), "--to", os.fspath(local))
        run_job(ctx, ctx.job("warm-cache", "-m", "trainer.cache", *places, each_node=True))
        record = {"v": 1, "fingerprint": key, "shared": os.fspath(shared), "local": os.fspath(local)}
        files.write_json(ctx.run.compile_cache, record)
        return record

    def done() -> str:
        if not ctx.config.backend.compile:
            return "backend.compile=false"
        return "" if (shared / MANIFEST).is_file() else "no graphs were compiled (no C++ compiler)"

    run_stage(ctx, "warm_cache", key, work, done=done)


def cache_env(config: Config, folder: Path) -> dict[str, str]:
    """Variables that make the device's compiler keep its graphs in a folder."""
    return {DEVICES[config.backend.device].cache_variable: os.fspath(folder)}


def _publish(partial: Path, shared: Path) -> dict[str, Any]:
    """Move a filled cache to its place, whole; another run may have been quicker, and equal keys mean equal graphs."""
    if not (partial / MANIFEST).is_file():
        return {"files": 0}
    count = len(files.read_json(partial / MANIFEST)["files"])
    if not shared.exists():
        partial.rename(shared)
    return {"files": count}
