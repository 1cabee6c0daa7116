"""Compile, warm cache and coverage gate: compile graphs into a shared cache, copy them to every worker, and check them.

The coverage gate trains a few steps in a scratch folder, which must find every graph in the cache. It runs on all nodes
of the run: PyTorch/XLA's graphs contain the process groups, so fewer nodes would need other graphs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from conf import fingerprint
from conf.environment import NEURON_PACKAGES, cache_variable
from conf.registries import LAUNCHERS
from conf.schema import Config
from flows.runtime.amended import config_words
from flows.runtime.context import FlowContext, cache_root
from flows.runtime.jobs import alone, run_job
from flows.stages import run_stage
from hlatctl.cache.graphs import write_manifest
from hlatctl.cache.store import MANIFEST, NEURON, Folder, modules
from hlatctl.cache.trust import make_private
from hlatctl.run import files
from hlatctl.run.errors import CompileError
from hlatctl.run.files import reading
from hlatctl.run.provenance import package_versions

#: The file with a node's compile times, in its folder.
REPORT = "report.json"
#: Packages whose versions compiled graphs depend on.
_GRAPH_PACKAGES = ("hlatctl", "triton", *NEURON_PACKAGES)


def graph_key(config: Config) -> str:
    """Return the fingerprint of a configuration's graphs with the software installed here."""
    return fingerprint.graph_fingerprint(config, package_versions(_GRAPH_PACKAGES))


def shared_cache(config: Config) -> Path:
    """Return the folder of a configuration's graphs that all runs share."""
    return cache_root(config) / "compile" / graph_key(config)


def local_cache(config: Config) -> Path:
    """Return the folder of a configuration's graphs on each worker's own disk."""
    return Path(config.cluster.worker_cache_dir) / "compile" / graph_key(config)


def nothing_ahead(config: Config) -> str:
    """Return why no graph is compiled before training; empty: graphs are compiled."""
    if not config.backend.compile:
        return "backend.compile=false"
    if "compiles_ahead" not in config.backend.kind.traits:
        return f"backend.name={config.backend.name} compiles in its first step"
    if config.backend.kind.torch_xla and config.backend.device == "cpu":
        return "backend.device=cpu: torch-xla keeps no compiled graphs there"
    return ""


def compile_graphs(ctx: FlowContext) -> None:
    """Fill the shared cache with a short run of the trainer that extracts the graphs."""
    key, shared = graph_key(ctx.config), shared_cache(ctx.config)

    partial = shared.with_name(f".{key}.{ctx.run.run_id}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a driver that was killed

    def work() -> dict[str, Any]:
        make_private(shared.parent)
        with alone(ctx, shared, "compile"):
            if (shared / MANIFEST).is_file():
                return {"files": _count(shared)}
            return compile_into(partial)

    def compile_into(partial: Path) -> dict[str, Any]:
        make_private(partial)
        words = ("--run-dir", os.fspath(ctx.run.root), *config_words(ctx), "--attempt", "0")
        env, wrapper = cache_env(ctx.config, partial), _wrapper(ctx.config, partial)
        job = ctx.job("compile", "-m", "trainer", *words, "--compile-only", distributed=True, env=env, wrapper=wrapper)
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
    """Copy the shared cache to each worker's own disk, verified, and record where it is.

    With a scheduler, each job of training makes its own copy (:func:`warm_wrapper`), so no job is submitted here.
    """
    key, shared, local = graph_key(ctx.config), shared_cache(ctx.config), local_cache(ctx.config)

    def work() -> dict[str, Any]:
        if not warm_wrapper(ctx.config):
            run_job(ctx, ctx.job("warm-cache", *_copy(ctx.config), each_node=True))
        record = {"v": 1, "fingerprint": key, "shared": os.fspath(shared), "local": os.fspath(local)}
        files.write_json(ctx.run.compile_cache, record)
        return record

    def done() -> str:
        missing = "" if (shared / MANIFEST).is_file() else "no graphs were compiled (no C++ compiler)"
        return nothing_ahead(ctx.config) or missing

    run_stage(ctx, "warm_cache", key, work, done=done)


def warm_wrapper(config: Config) -> tuple[str, ...]:
    """Return the program that copies the cache to a node before a job's command runs there; empty: the copy exists.

    A scheduler gives each job other nodes, so a copy that an earlier job made may be elsewhere.
    """
    if not LAUNCHERS[config.cluster.launcher].copies_graphs or nothing_ahead(config):
        return ()
    return (*_copy(config), "--")


def cache_env(config: Config, folder: Path) -> dict[str, str]:
    """Return the variable that sets the compiler's cache folder."""
    return {cache_variable(config): os.fspath(folder)}


def _copy(config: Config) -> tuple[str, ...]:
    places = ("--from", os.fspath(shared_cache(config)), "--to", os.fspath(local_cache(config)))
    return ("-m", "trainer.cache", *places)


def _wrapper(config: Config, folder: Path) -> tuple[str, ...]:
    """Return the program that extracts and compiles a node's graphs in parallel; empty: none."""
    if not config.backend.kind.torch_xla:
        return ()
    return ("-m", "trainer.neuron.parallel_compile", "--to", os.fspath(folder), "--")


def _publish(partial: Path, shared: Path) -> dict[str, Any]:
    """Rename a filled cache to its final name, unless another run already did: equal keys mean equal graphs."""
    if not (partial / MANIFEST).is_file():
        return {"files": 0}
    if not shared.exists():
        partial.rename(shared)
    return {"files": _count(shared)}


def _count(folder: Path) -> int:
    with reading(folder / MANIFEST):
        return len(files.read_json(folder / MANIFEST)["files"])


def merge_nodes(folder: Path) -> dict[str, Any]:
    """Move the complete modules of all nodes from ``node-<host>/`` into one cache, and write its manifest.

    Returns the numbers of graphs and nodes, and the time of the slowest graph.

    Raises:
        CompileError: nodes had different compilers, or compiled nothing.
    """
    nodes = sorted(folder.glob("node-*"))
    compilers = {path.name for node in nodes for path in node.glob("neuronxcc-*")}
    if len(compilers) != 1:
        versions = ", ".join(sorted(compilers)) or "none"
        raise CompileError(
            f"compilers of {len(nodes)} nodes: {versions}; all nodes must have the same",
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


STAGE = "coverage"


def check_coverage(ctx: FlowContext) -> None:
    """Check with a short attempt that every graph is in the cache; the CompileError names a missing one."""
    key = graph_key(ctx.config)

    def work() -> dict[str, Any]:
        ctx.run.coverage.unlink(missing_ok=True)
        words = ("--run-dir", os.fspath(ctx.run.root), *config_words(ctx), "--attempt", "0")
        env, wrapper = cache_env(ctx.config, local_cache(ctx.config)), warm_wrapper(ctx.config)
        job = ctx.job(STAGE, "-m", "trainer", *words, "--check-coverage", distributed=True, env=env, wrapper=wrapper)
        limit_s = ctx.config.recovery.start_timeout_s
        run_job(ctx, job, timeout_s=limit_s, timeout_key="recovery.start_timeout_s")
        with reading(ctx.run.coverage):
            record = files.read_json(ctx.run.coverage)
            return {name: record[name] for name in ("hits", "misses")}

    def done() -> str:
        passed = ctx.state.stages.get(STAGE)
        if why := no_coverage(ctx.config):
            return why
        if not (shared_cache(ctx.config) / MANIFEST).is_file():
            return "no graphs were compiled"
        if ctx.training_lives():
            return "training is running on the nodes"
        if passed and passed.status == "finished" and passed.fingerprint == key:
            return "every graph was found before"
        return ""

    run_stage(ctx, STAGE, key, work, done=done)


def no_coverage(config: Config) -> str:
    """Return why the configuration needs no coverage gate; empty: it does."""
    return nothing_ahead(config) or ("" if config.backend.coverage_gate else "backend.coverage_gate=false")
