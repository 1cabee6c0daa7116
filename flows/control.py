"""Asks a run to stop, from any process that shares its runs folder."""

from __future__ import annotations

from conf.of_run import of_run
from flows.launch.base import launcher_for
from flows.runtime.context import live_training
from flows.stages.attempt import STOP_GRACE_S
from hlatctl.run import files, stopping
from hlatctl.run.errors import StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.lease import driver, wait_until_undriven
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState


def request_stop(run: RunPaths, *, by: str, wait_s: float) -> RunState:
    """Ask a run to write a checkpoint and stop, and wait for it.

    The run's driver reads the request from the journal. If the driver is dead, a training job that is still running is
    cancelled directly, even on a full disk, and the run's kept nodes are released.

    Args:
        by: name of the requester, for the journal.
        wait_s: seconds to wait for the driver to end.

    Returns:
        The state after the wait.

    Raises:
        StorageError: the request can't be written to the journal, so the driver can't read it.
    """
    try:
        with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER) as journal:
            stopping.request(run, journal, by=by)
    except StorageError as error:
        if driven_by := driver(run):
            if driven_by.pid:
                on = f" on {driven_by.host}" if driven_by.is_elsewhere else ""
                error.hint = f"`kill -INT {driven_by.pid}`{on} asks the run's driver to stop; or free space"
            raise
    wait_until_undriven(run, wait_s)
    if driver(run) is None:
        launcher = launcher_for(of_run(run))
        if job := live_training(read_state(run), launcher):
            launcher.cancel(job, grace_s=STOP_GRACE_S)
        launcher.release(run.root)
    return read_state(run)
