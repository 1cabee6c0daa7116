"""Asking a run to stop, from any process of this machine."""

from __future__ import annotations

import conf.load
from flows.launch.base import Handle
from flows.launchers import launcher_for
from flows.stages.train import STOP_GRACE_S
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.fold import fold
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.lease import driver_pid, wait_until_undriven
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState


def request_stop(run: RunPaths, *, by: str, wait_s: float) -> RunState:
    """Ask a run to write a checkpoint and stop, and wait for it.

    The process that drives the run sees the request in the journal. Where none does, but the training job still lives,
    the job itself is asked.

    Args:
        by: who asks; goes into the journal.
        wait_s: how long to wait until nothing drives the run any more.

    Returns:
        The state after that.

    Raises:
        StorageError: the request can't be written down.
    """
    try:
        with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER) as journal:
            journal.append("stop_requested", durable=True, by=by)
    except StorageError as error:
        pid = driver_pid(run)
        error.hint = f"`kill -INT {pid}` asks the run's process to stop; or free space" if pid else error.hint
        raise
    wait_until_undriven(run, wait_s)
    state = fold(read_events(run))
    if driver_pid(run) is None:
        _stop_orphan(run, state)
    return fold(read_events(run))


def _stop_orphan(run: RunPaths, state: RunState) -> None:
    attempt = state.attempt
    if attempt is None or attempt.ended_unix_s is not None:
        return
    launcher = launcher_for(conf.load.load(run.config))
    handle = Handle.from_json(attempt.handle)
    if not launcher.status(handle).ended:
        launcher.cancel(handle, grace_s=STOP_GRACE_S)
