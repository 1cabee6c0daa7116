"""What a flow would do, without doing it: for ``hlatctl plan``. Touches nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from conf import environment, fingerprint
from conf.schema import Config
from flows.launchers import launcher_for
from flows.runtime.context import cache_root, is_mock
from flows.stages.compile import graph_key, nothing_ahead
from flows.stages.coverage import no_coverage
from flows.stages.train import training_job
from hlatctl.cache.layout import MANIFEST
from hlatctl.run.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """One stage: its fingerprint and whether it would run."""

    name: str
    fingerprint: str
    will_run: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class FlowDescription:
    """All stages in order, and the script that would start training."""

    stages: list[StageDescription]
    launch_script: str
    collisions: list[str]
    """What of this process's environment the training processes would not see."""
    simulated: bool
    """The launcher only simulates, so that `hlatctl train` needs ``--dry-run``."""


def describe(config: Config) -> FlowDescription:
    """What `hlatctl train` would do with a configuration in its runs folder."""
    cache = cache_root(config)
    data_key, graphs = fingerprint.data_fingerprint(config), graph_key(config)
    whole, hardware = fingerprint.config_fingerprint(config), fingerprint.hardware_fingerprint(config)
    prepared = (cache / "data" / data_key / "dataset.json").is_file()
    compiled = (cache / "compile" / graphs / MANIFEST).is_file()
    stages = [
        StageDescription(name="validate", fingerprint=whole, will_run=True, why="always"),
        StageDescription(name="provenance", fingerprint=whole, will_run=True, why="once a run"),
        StageDescription(name="preflight", fingerprint=hardware, will_run=True, why="always"),
        StageDescription(
            name="data",
            fingerprint=data_key,
            will_run=not prepared,
            why="prepared before" if prepared else "not prepared yet",
        ),
        _compile_stage(config, graphs, compiled),
        StageDescription(
            name="warm_cache",
            fingerprint=graphs,
            will_run=not (none := nothing_ahead(config)),
            why=none or "checked every time",
        ),
        StageDescription(
            name="coverage",
            fingerprint=graphs,
            will_run=not (why_not := no_coverage(config)),
            why=why_not or "a few steps must find every graph in the cache",
        ),
        StageDescription(name="train", fingerprint=whole, will_run=True, why=f"{config.total_steps:,} steps"),
        StageDescription(
            name="evaluate",
            fingerprint=whole,
            will_run=bool(config.milestones),
            why=f"{len(config.milestones)} milestones" if config.milestones else "eval.enabled=false",
        ),
        StageDescription(name="report", fingerprint=whole, will_run=True, why="always"),
    ]
    job = training_job(config, RunPaths(Path(config.runs_dir) / "RUN_ID"), 1)
    return FlowDescription(
        stages=stages,
        launch_script=launcher_for(config).render(job).script,
        collisions=[str(collision) for collision in environment.collisions(config, os.environ)],
        simulated=is_mock(config),
    )


def _compile_stage(config: Config, key: str, compiled: bool) -> StageDescription:
    if none := nothing_ahead(config):
        return StageDescription(name="compile", fingerprint=key, will_run=False, why=none)
    why = "compiled before" if compiled else "not compiled yet"
    return StageDescription(name="compile", fingerprint=key, will_run=not compiled, why=why)
