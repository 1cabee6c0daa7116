"""Describes what a flow would do, and how much work its evaluations are, for ``hlatctl plan``. Changes nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf import environment, fingerprint
from conf.schema import Config
from flows.launch.base import Launcher, launcher_for
from flows.launch.slurm.launcher import SlurmLauncher
from flows.runtime.context import cache_root, is_simulated
from flows.runtime.programs import ask_about
from flows.stages.attempt import training_job
from flows.stages.compile import graph_key, no_coverage, nothing_ahead
from hlatctl.cache.store import MANIFEST
from hlatctl.run.errors import HlatctlError
from hlatctl.run.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """One stage, its fingerprint, and whether it would run."""

    name: str
    fingerprint: str
    will_run: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class FlowDescription:
    """All stages in order, and the script that would start training."""

    stages: list[StageDescription]
    launch_script: str
    nodes_script: str
    """The script that keeps the nodes for the training job; empty without a scheduler."""
    collisions: list[str]
    """Variables of this process's environment that the training processes would not get."""
    simulated: bool
    """The launcher only simulates, so `hlatctl train` needs ``--dry-run``."""


def describe(config: Config) -> FlowDescription:
    """Describe what `hlatctl train` would do with a configuration in its runs folder."""
    cache = cache_root(config)
    data_key, graphs = fingerprint.data_fingerprint(config), graph_key(config)
    whole, hardware = fingerprint.config_fingerprint(config), fingerprint.hardware_fingerprint(config)
    prepared = (cache / "data" / data_key / "dataset.json").is_file()
    compiled = (cache / "compile" / graphs / MANIFEST).is_file()
    none_ahead, none_covered, milestones = nothing_ahead(config), no_coverage(config), len(config.milestones)
    compile_why = "compiled before" if compiled else "not compiled yet"
    stages = [
        _stage("validate", whole, "always"),
        _stage("provenance", whole, "once a run"),
        _stage("data", data_key, "prepared before" if prepared else "not prepared yet", will_run=not prepared),
        _stage("preflight", hardware, "always"),
        _stage("compile", graphs, none_ahead or compile_why, will_run=not (none_ahead or compiled)),
        _stage("warm_cache", graphs, none_ahead or "checked every time", will_run=not none_ahead),
        _stage(
            "coverage",
            graphs,
            none_covered or "a few steps must find every graph in the cache",
            will_run=not none_covered,
        ),
        _stage("train", whole, f"{config.total_steps:,} steps"),
        _stage(
            "evaluate",
            whole,
            f"{milestones} milestones" if milestones else "eval.enabled=false",
            will_run=bool(milestones),
        ),
        _stage("report", whole, "always"),
    ]
    job = training_job(config, RunPaths(Path(config.runs_dir) / "RUN_ID"), 1)
    plan = _launcher(config).render(job)
    return FlowDescription(
        stages=stages,
        launch_script=plan.script,
        nodes_script=plan.nodes_script,
        collisions=[str(collision) for collision in environment.collisions(config, os.environ)],
        simulated=is_simulated(config),
    )


def _launcher(config: Config) -> Launcher:
    """Return a launcher whose script can show the job: one machine's script can't start a job of several nodes."""
    if is_simulated(config) and config.cluster.nodes > 1:
        return SlurmLauncher.of(config)
    return launcher_for(config)


def _stage(name: str, key: str, why: str, *, will_run: bool = True) -> StageDescription:
    return StageDescription(name=name, fingerprint=key, will_run=will_run, why=why)


#: Time limit: the harness reads its definitions and renders some items of each task.
_TIMEOUT_S = 300.0


def workload(config: Config) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the records of ``eval.workload``, or None and why there are none. The data folder may be missing."""
    if config.eval.data_dir is None:
        return None, ""
    try:
        records: list[dict[str, Any]] = json.loads(ask_about("eval.workload", config, timeout_s=_TIMEOUT_S))
    except HlatctlError as error:
        return None, error.message
    return records, ""
