"""Asking a run to stop, from any process that shares its runs folder."""

from __future__ import annotations

import conf.load
from flows.launchers import launcher_for
from flows.runtime.context import live_training
from flows.stages.train import STOP_GRACE_S
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.fold import fold
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.lease import driver, wait_until_undriven
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState


def request_stop(run: RunPaths, *, by: str, wait_s: float) -> RunState:
    """Ask a run to write a checkpoint and stop, and wait for it.

    The run's driver reads the request from the journal. If the driver is dead and the training job still runs, the job
    is cancelled directly.

    Args:
        run: its directory.
        by: the name of the requester; written to the journal.
        wait_s: seconds to wait for the driver to end.

    Returns:
        The state after that.

    Raises:
        StorageError: the request can't be written to the journal.
    """
    try:
        with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER) as journal:
            journal.append("stop_requested", durable=True, by=by)
    except StorageError as error:
        driven_by = driver(run)
        if driven_by and driven_by.pid:
            on = f" on {driven_by.host}" if driven_by.is_elsewhere else ""
            error.hint = f"`kill -INT {driven_by.pid}`{on} asks the run's driver to stop; or free space"
        raise
    wait_until_undriven(run, wait_s)
    if driver(run) is None:
        launcher = launcher_for(conf.load.load(run.config))
        if job := live_training(fold(read_events(run)), launcher):
            launcher.cancel(job, grace_s=STOP_GRACE_S)
    return fold(read_events(run))
