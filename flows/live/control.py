"""What the page can do to a run: the same as `hlatctl stop` and `hlatctl resume --detach`."""

from __future__ import annotations

import getpass
from typing import Any

from flows.control import request_stop
from flows.runtime import programs
from hlatctl.report.run_view import view_run
from hlatctl.run.errors import RunBusyError
from hlatctl.run.paths import RunPaths


def stop(run: RunPaths) -> dict[str, Any]:
    """Ask a run to write a checkpoint and stop; doesn't wait for it.

    Raises:
        RunBusyError: the run has already ended.
        StorageError: the request can't be written.
    """
    view = view_run(run)
    if view.at_rest:
        raise RunBusyError(f"run {run.run_id}: is already {view.status}", hint="reload the page to see its state")
    request_stop(run, by=_user(), wait_s=0.0)
    return {"run_id": run.run_id, "status": view_run(run).status}


def resume(run: RunPaths) -> dict[str, Any]:
    """Start a driver for a run in a process of its own, and return when it drives the run.

    Raises:
        RunBusyError: the run has a driver, or there is nothing to continue.
        HlatctlError: the driver doesn't start.
    """
    view = view_run(run)
    if not view.ended:
        where = view.driver_elsewhere or f"process {view.driver_pid}"
        raise RunBusyError(f"run {run.run_id}: {where} drives it", hint="stop it first, or wait until it ends")
    if not view.can_resume:
        raise RunBusyError(
            f"run {run.run_id}: is {view.status}", hint=f"`hlatctl status {run.run_id}` shows what can be done"
        )
    driver = programs.start_driver(run)
    return {"run_id": run.run_id, "status": "running", "pid": driver.pid}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"
