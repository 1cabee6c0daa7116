"""Copies to MLflow beside a flow: processes of their own, so that a slow or absent MLflow delays nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from conf.schema import Config
from flows.runtime import spawn
from flows.runtime.context import FlowContext
from hlatctl.run.paths import SweepPaths


def start(ctx: FlowContext) -> subprocess.Popen[bytes] | None:
    """Start ``python -m flows.tracking.mlflow_sync RUN_DIR``; None if tracking is off."""
    if not ctx.config.tracking.enabled:
        return None
    log_dir = ctx.run.logs(0)
    log_dir.mkdir(parents=True, exist_ok=True)
    with (log_dir / "mirror.log").open("ab") as log:
        return spawn.beside(spawn.command("flows.tracking.mlflow_sync", os.fspath(ctx.run.root)), log)


def finish(ctx: FlowContext, follower: subprocess.Popen[bytes] | None) -> None:
    """Wait a bounded time until the mirror has brought everything; what is missing, ``hlatctl sync`` brings later."""
    if follower is None:
        return
    try:
        code = follower.wait(timeout=ctx.config.tracking.final_sync_timeout_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        follower.terminate()
        code = follower.wait()
    if code:
        ctx.message(f"MLflow has not got everything yet; bring it up to date with: hlatctl sync {ctx.run.run_id}")


def abandon(follower: subprocess.Popen[bytes] | None) -> None:
    """End the mirror at once."""
    if follower is not None:
        follower.terminate()
        follower.wait()


def conclude_sweep(sweep: SweepPaths, config: Config, say: Callable[[str], None]) -> None:
    """Copy a sweep's figures to its MLflow run, in a bounded time.

    Args:
        sweep: its directory.
        config: of its trials.
        say: told if it fails.
    """
    if not config.tracking.enabled:
        return
    with (sweep.root / "mirror.log").open("ab") as log:
        copier = spawn.beside(spawn.command("flows.tracking.mlflow_sweep", os.fspath(sweep.root)), log)
    try:
        code = copier.wait(config.tracking.final_sync_timeout_s)
    except subprocess.TimeoutExpired:
        copier.terminate()
        code = copier.wait()
    if code:
        say(f"MLflow has not got the sweep's figures; see {sweep.root / 'mirror.log'}")
