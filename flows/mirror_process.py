"""The mirror beside a flow: a process of its own, so that a slow or absent MLflow delays nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from flows.context import FlowContext


def start(ctx: FlowContext) -> subprocess.Popen[bytes] | None:
    """Start ``python -m flows.mirror RUN_DIR``; None if tracking is off."""
    if not ctx.config.tracking.enabled:
        return None
    log_dir = ctx.run.logs(0)
    log_dir.mkdir(parents=True, exist_ok=True)
    with (log_dir / "mirror.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.mirror", os.fspath(ctx.run.root)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


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
