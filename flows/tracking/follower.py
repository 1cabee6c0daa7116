"""Copying to MLflow in separate processes, so that a slow or absent MLflow delays nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from conf.schema import Config
from flows.runtime import spawn
from flows.runtime.context import FlowContext
from hlatctl.run.paths import SweepPaths

Process = subprocess.Popen[bytes]


def start(ctx: FlowContext) -> Process | None:
    """Start the process that copies a run's journal to MLflow while it grows; None if tracking is off."""
    if not ctx.config.tracking.enabled:
        return None
    log_dir = ctx.run.logs(0)
    log_dir.mkdir(parents=True, exist_ok=True)
    return _copier("mlflow_sync", ctx.run.root, log_dir / "mirror.log")


def finish(ctx: FlowContext, copier: Process | None) -> None:
    """Wait until everything is copied, at most ``tracking.final_sync_timeout_s``. `hlatctl sync` copies the rest."""
    if copier and not _completes(copier, ctx.config):
        ctx.message(f"MLflow is not up to date yet; to copy the rest: hlatctl sync {ctx.run.run_id}")


def abandon(copier: Process | None) -> None:
    """End the process at once."""
    if copier is not None:
        copier.terminate()
        copier.wait()


def conclude_sweep(sweep: SweepPaths, config: Config, say: Callable[[str], None]) -> None:
    """Copy a sweep's numbers to its MLflow run, within ``tracking.final_sync_timeout_s``.

    Args:
        sweep: its directory.
        config: of its trials.
        say: called with a message if it fails.
    """
    log = sweep.root / "mirror.log"
    if config.tracking.enabled and not _completes(_copier("mlflow_sweep", sweep.root, log), config):
        say(f"the sweep's numbers are not in MLflow; see {log}")


def _copier(module: str, folder: Path, log: Path) -> Process:
    with log.open("ab") as output:
        return spawn.beside(spawn.command(f"flows.tracking.{module}", os.fspath(folder)), output)


def _completes(copier: Process, config: Config) -> bool:
    """Wait for a copy; whether it succeeded in time. A timeout or Ctrl-C ends it."""
    try:
        return copier.wait(timeout=config.tracking.final_sync_timeout_s) == 0
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        abandon(copier)
        return False
