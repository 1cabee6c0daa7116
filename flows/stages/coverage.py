"""Coverage gate: before training, a few steps in a scratch folder must find every graph in the cache.

The steps run on all nodes of the run: PyTorch/XLA's graphs contain the process groups, so fewer nodes would need other
graphs.
"""

from __future__ import annotations

import os
from typing import Any

from conf.schema import Config
from flows.runtime.amended import config_words
from flows.runtime.context import FlowContext
from flows.runtime.jobs import run_job
from flows.stages import run_stage
from flows.stages.compile import cache_env, graph_key, local_cache, nothing_ahead, shared_cache, warm_wrapper
from hlatctl.cache.layout import MANIFEST
from hlatctl.run import files
from hlatctl.run.reading import reading

STAGE = "coverage"


def check_coverage(ctx: FlowContext) -> None:
    """Check with a short attempt that every graph is in the cache.

    Raises:
        CompileError: names a missing graph.
    """
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
