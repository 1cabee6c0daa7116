"""Compile a run's graphs, and check that the compiler's cache has all of them.

A short attempt of a few steps uses the run's own loop. So it needs the graphs of the first step, of the second (whose
moments exist), of later ones, of each micro-batch and of a checkpoint. Evaluation needs none of these graphs, because
it is a separate process with an exported model.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.environment import cache_variable
from conf.schema import Config
from conf.training_rules import learning_rate
from hlatctl.cache.store import INDUCTOR, Folder, modules
from hlatctl.run import files
from hlatctl.run.errors import CompileError
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import node_name

if TYPE_CHECKING:
    from trainer.backends.base import Backend

#: Set by neuron_parallel_compile: graphs are extracted, not executed, and all results are zeros.
EXTRACTING = "NEURON_EXTRACT_GRAPHS_ONLY"
#: Graphs of steps 1 and 2 differ, those of later steps don't (PyTorch/XLA 2.9). HLAT's scripts extract from 4 too.
STEPS = 4


def visit(config: Config, run: RunPaths, backend: Backend) -> None:
    """Train a few steps in a temporary folder of the run; the run's own files don't change."""
    from trainer.step.loop import Training

    scratch = RunPaths(run.root / ".short-attempt")
    if backend.rank == 0:
        shutil.rmtree(scratch.root, ignore_errors=True)
        scratch.root.mkdir()
        shutil.copyfile(run.dataset, scratch.dataset)
    backend.gather(None)
    try:
        Training(_short(config), scratch, backend, None).run()
        backend.gather(None)
    finally:
        if backend.rank == 0:
            shutil.rmtree(scratch.root, ignore_errors=True)


def _short(config: Config) -> Config:
    """Return a configuration with the same graphs, few steps and one checkpoint at the end."""
    return replace(
        config,
        train=replace(config.train, max_steps=STEPS, init_from=None),
        checkpoint=replace(config.checkpoint, every_steps=STEPS, fast_dir=None, mode="sync"),
        eval=replace(config.eval, enabled=False),
    )


def compile_only(config: Config, backend: Backend) -> None:
    """Run one step on random tokens of the real shapes, which compiles and caches every graph."""
    import torch

    model = backend.build_model(document_end_id=0 if config.data.mask_across_documents else None)
    optimizer = backend.optimizer(model)
    optimizer.zero_grad()
    # Two micro-batches: adding to existing gradients may need another graph. A pipeline needs all of them.
    micro_batches = config.grad_accum_steps if config.parallel.pipeline_parallel_size > 1 else 2
    shape = (config.micro_batch_size * min(micro_batches, config.grad_accum_steps), config.train.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape)
    loss_share = backend.forward_backward(model, tokens, tokens)
    metrics = backend.update(optimizer, loss_share, lr=learning_rate(1, config), step=1)
    backend.step_boundary()
    metrics()
    backend.drift(optimizer)


def cached_graphs(config: Config) -> set[str]:
    """Return the names of the graphs in this process's compiler cache, without Inductor's kernels."""
    folder = os.environ.get(cache_variable(config))
    if not folder or not Path(folder).is_dir():
        return set()
    cached = modules(Folder(Path(folder)).files())
    return {module.name for module in cached if module.layout != INDUCTOR or module.name.startswith("fxgraph/")}


def check(config: Config, run: RunPaths, backend: Backend, before: set[str]) -> None:
    """Write ``coverage.json``. Graphs that are new in the cache, compared with ``before``, were missing.

    Raises a CompileError if a graph was missing on any process.
    """
    mine = {
        "host": node_name(),
        "rank": backend.rank,
        **backend.compile_counters(),
        "missing": sorted(cached_graphs(config) - before),
    }
    processes = backend.gather(mine)
    if backend.rank == 0:
        record = summary(processes)
        files.write_json(run.coverage, {"v": 1, **record, "processes": processes})
        if record["misses"]:
            raise _missing(run, record)


def summary(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of all processes, and each missing graph of a host once.

    Several processes and cache layers may count the same miss, so new graphs in the cache are counted if there are
    any. Misses without a new graph can't be cached. For a compiler without counters only the cache decides.
    """
    missing = sorted({f"{p['host']}: {graph}" for p in processes for graph in p["missing"]})
    hits, misses = (sum(p.get(key, 0) for p in processes) for key in ("hits", "misses"))
    return {"hits": hits, "misses": len(missing) or misses, "missing": missing}


def _missing(run: RunPaths, record: dict[str, Any]) -> CompileError:
    named = record["missing"]
    what = f", the first {named[0]}" if named else ": they can't be cached"
    try:
        shared = files.read_json(run.compile_cache)["shared"]
    except (OSError, *DAMAGED):
        shared = "the shared cache of compiled graphs"
    return CompileError(
        f"graphs that a short attempt needs and the cache lacks: {record['misses']}{what}",
        hint=f"{run.coverage} lists them; remove {shared} to compile them again, or skip this check with "
        "backend.coverage_gate=false",
    )
