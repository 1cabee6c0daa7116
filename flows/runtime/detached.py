"""Start a driver as a process of its own that outlives the process that starts it."""

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
    """Start ``hlatctl resume`` in a session of its own, and wait until it drives the run or has succeeded.

    Args:
        run: a run without a driver.
        inside: a command that runs the words after it, such as bubblewrap.
        env: variables to add to this process's.

    Raises:
        LaunchError: it failed, or did not start to drive the run in time.
    """
    log = driver_log(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        resume = spawn.command("hlatctl", "resume", run.run_id, "--runs-dir", os.fspath(run.root.parent))
        driver = spawn.beside([*inside, *resume], output, env={**os.environ, **(env or {})})
    deadline = time.monotonic() + _START_TIMEOUT_S
    while driver_pid(run) not in (driver.pid, *processes.descendants(driver.pid)):
        if driver.poll() == 0:
            break  # it had nothing left to do
        if driver.returncode is not None:
            raise LaunchError(f"run {run.run_id}: driver ended with exit code {driver.returncode}", hint=f"see {log}")
        if time.monotonic() > deadline:
            driver.kill()  # it would drive the run later, when nobody expects that any more
            driver.wait()
            raise LaunchError(f"run {run.run_id}: no driver after {_START_TIMEOUT_S:g} s", hint=f"see {log}")
        time.sleep(_POLL_S)
    return driver


def driver_log(run: RunPaths) -> Path:
    """Return the file that takes the output of a detached driver."""
    return run.root / "logs" / "head.log"
