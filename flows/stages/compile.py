"""Compile and warm cache: graphs are compiled once into a shared cache, then brought to every worker's own disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from conf import fingerprint
from conf.environment import NEURON_PACKAGES, cache_variable
from conf.schema import Config
from flows.runtime.context import FlowContext, cache_root
from flows.runtime.jobs import run_job
from flows.stages import run_stage
from hlatctl.cache.layout import MANIFEST, NEURON, modules
from hlatctl.cache.manifest import write_manifest
from hlatctl.cache.store import Folder
from hlatctl.cache.trust import make_private
from hlatctl.run import files
from hlatctl.run.errors import CompileError
from hlatctl.run.provenance import package_versions
from hlatctl.run.reading import reading

#: What a node that compiled leaves in its folder.
REPORT = "report.json"
#: Packages whose version enters a compiled graph.
_GRAPH_PACKAGES = ("hlatctl", "triton", *NEURON_PACKAGES)


def graph_key(config: Config) -> str:
    """Fingerprint of the graphs of a configuration with the software installed here."""
    return fingerprint.graph_fingerprint(config, package_versions(_GRAPH_PACKAGES))


def shared_cache(config: Config) -> Path:
    """Where a configuration's graphs are kept for all runs."""
    return cache_root(config) / "compile" / graph_key(config)


def local_cache(config: Config) -> Path:
    """Where they are on each worker's own disk."""
    return Path(config.cluster.worker_cache_dir) / "compile" / graph_key(config)


def nothing_ahead(config: Config) -> str:
    """Why no graph of a configuration is compiled before training; empty if graphs are."""
    if not config.backend.compile:
        return "backend.compile=false"
    if config.backend.name == "nxd" and config.backend.device == "cpu":
        return "backend.device=cpu: torch-xla keeps no compiled graphs there"
    return ""


def compile_graphs(ctx: FlowContext) -> None:
    """Fill the shared cache by a short graph-extraction run of the trainer."""
    key, shared = graph_key(ctx.config), shared_cache(ctx.config)

    partial = shared.with_name(f".{key}.{ctx.run.run_id}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a head that was killed

    def work() -> dict[str, Any]:
        make_private(partial)
        job = ctx.job(
            "compile",
            "-m",
            "trainer",
            "--run-dir",
            os.fspath(ctx.run.root),
            "--attempt",
            "0",
            "--compile-only",
            distributed=True,
            env=cache_env(ctx.config, partial),
            wrapper=_wrapper(ctx.config, partial),
        )
        try:
            run_job(ctx, job)
            graphs = merge_nodes(partial) if job.wrapper else {}
            return {**_publish(partial, shared), **graphs}
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def done() -> str:
        compiled = f"compiled before in {shared}" if (shared / MANIFEST).is_file() else ""
        return nothing_ahead(ctx.config) or compiled

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
        lacking = "" if (shared / MANIFEST).is_file() else "no graphs were compiled (no C++ compiler)"
        return nothing_ahead(ctx.config) or lacking

    run_stage(ctx, "warm_cache", key, work, done=done)


def cache_env(config: Config, folder: Path) -> dict[str, str]:
    """The variable that makes the compiler keep its graphs in a folder."""
    return {cache_variable(config): os.fspath(folder)}


def _wrapper(config: Config, folder: Path) -> tuple[str, ...]:
    """What starts the short run on each node so that its graphs are extracted and compiled side by side."""
    if config.backend.name != "nxd":
        return ()
    return ("-m", "trainer.neuron.parallel_compile", "--to", os.fspath(folder), "--")


def _publish(partial: Path, shared: Path) -> dict[str, Any]:
    """Move a filled cache to its place, whole; another run may have been quicker, and equal keys mean equal graphs."""
    if not (partial / MANIFEST).is_file():
        return {"files": 0}
    with reading(partial / MANIFEST):
        count = len(files.read_json(partial / MANIFEST)["files"])
    if not shared.exists():
        partial.rename(shared)
    return {"files": count}


def merge_nodes(folder: Path) -> dict[str, Any]:
    """Bring the complete modules that each node has compiled into one cache, described by its manifest.

    Args:
        folder: with ``node-<host>/`` of each node; they are gone afterwards.

    Returns:
        How many graphs of how many nodes there are, and what the slowest took.

    Raises:
        CompileError: nodes had different compilers, or compiled nothing.
    """
    nodes = sorted(folder.glob("node-*"))
    compilers = {path.name for node in nodes for path in node.glob("neuronxcc-*")}
    if len(compilers) != 1:
        found = ", ".join(sorted(compilers)) or "none"
        raise CompileError(
            f"the compilers of {len(nodes)} nodes: {found}; all nodes must have one and the same",
            hint="install the same neuronx-cc on every node",
        )
    slowest_s = [_slowest_s(node / REPORT) for node in nodes if (node / REPORT).is_file()]
    complete = (
        (node, m) for node in nodes for m in modules(Folder(node).files()) if m.layout == NEURON and not m.problem
    )
    for node, module in complete:
        target = folder / module.name
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            (node / module.name).rename(target)
    for node in nodes:
        shutil.rmtree(node)
    write_manifest(folder)
    return {
        "graphs": len(list(folder.glob("neuronxcc-*/MODULE_*"))),
        "nodes": len(nodes),
        "slowest_graph_s": max(slowest_s, default=0.0),
    }


def _slowest_s(report: Path) -> float:
    with reading(report):
        return float(files.read_json(report)["slowest_graph_s"])
