"""Start a driver as a process of its own that outlives the process that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flows.runtime import spawn
from hlatctl.run import processes
from hlatctl.run.errors import ERROR_FILE_ENV, LaunchError, load_error
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.run.scratch import private_folder

_START_TIMEOUT_S = 60.0
_POLL_S = 0.1
#: From SIGTERM to SIGKILL.
_END_S = 5.0


def start_driver(
    run: RunPaths, *, inside: Sequence[str] = (), env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``hlatctl resume`` in a session of its own, and wait until it drives the run or has succeeded.

    Args:
        run: a run without a driver.
        inside: a command that runs the words after it, such as bubblewrap.
        env: variables to add to this process's.

    Raises:
        HlatctlError: the error with which it ended, such as RunBusyError if another process was faster.
        LaunchError: it ended without an error of its own, or did not start to drive the run in time.
    """
    log = driver_log(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with private_folder("driver") as own, log.open("ab") as output:
        error_file = own.path / "error.json"
        resume = spawn.command("hlatctl", "resume", run.run_id, "--runs-dir", os.fspath(run.root.parent))
        variables = {**os.environ, **(env or {}), ERROR_FILE_ENV: os.fspath(error_file)}
        driver = spawn.beside([*inside, *resume], output, env=variables)
        try:
            _wait_until_driving(run, driver, log, error_file)
        except BaseException:  # also an interrupt: nobody would know of a process that begins to drive later
            _end(driver)
            raise
    return driver


def _wait_until_driving(run: RunPaths, driver: subprocess.Popen[bytes], log: Path, error_file: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while driver_pid(run) not in (driver.pid, *processes.descendants(driver.pid)):
        if driver.poll() == 0:
            return  # it had nothing left to do
        if driver.returncode is not None:
            why = f"driver ended with exit code {driver.returncode}"
            raise load_error(error_file) or LaunchError(f"run {run.run_id}: {why}", hint=f"see {log}")
        if time.monotonic() > deadline:
            raise LaunchError(f"run {run.run_id}: no driver after {_START_TIMEOUT_S:g} s", hint=f"see {log}")
        time.sleep(_POLL_S)


def _end(driver: subprocess.Popen[bytes]) -> None:
    """End a driver and the command that it is inside of, which lead a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, number)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(_END_S)
            return


def driver_log(run: RunPaths) -> Path:
    """Return the file that takes the output of a detached driver."""
    return run.root / "logs" / "head.log"
