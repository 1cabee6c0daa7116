"""A head process of its own: drives a run, and outlives whoever started it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from flows.runtime import spawn
from hlatctl.run import processes
from hlatctl.run.errors import LaunchError
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths

_START_TIMEOUT_S = 60.0
_POLL_S = 0.1


def start_driver(
    run: RunPaths, *, inside: Sequence[str] = (), env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``hlatctl resume`` for a run in a session of its own; returns once it drives the run, or has ended well.

    Args:
        run: that nobody drives.
        inside: words of a command that runs the words after it, such as bubblewrap's.
        env: variables besides this process's.

    Raises:
        LaunchError: it ended, or did not begin.
    """
    log = driver_log(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        resume = spawn.command("hlatctl", "resume", run.run_id, "--runs-dir", os.fspath(run.root.parent))
        head = spawn.beside([*inside, *resume], output, env={**os.environ, **(env or {})})
    deadline = time.monotonic() + _START_TIMEOUT_S
    while driver_pid(run) not in (head.pid, *processes.descendants(head.pid)):
        if head.poll() == 0:
            break  # it had nothing left to do
        if head.returncode is not None:
            raise LaunchError(f"run {run.run_id}: its process ended with code {head.returncode}", hint=f"see {log}")
        if time.monotonic() > deadline:
            raise LaunchError(f"run {run.run_id}: not begun after {_START_TIMEOUT_S:g} s", hint=f"see {log}")
        time.sleep(_POLL_S)
    return head


def driver_log(run: RunPaths) -> Path:
    """Where a head of its own prints what it would show a person."""
    return run.root / "logs" / "head.log"
