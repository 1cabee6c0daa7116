"""Asking a sweep to stop, from any process of this machine."""

from __future__ import annotations

from flows import control
from hlatctl.run import files
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.lease import driver_pid, wait_until_undriven
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import SweepState, fold


def request_stop(sweep: SweepPaths, *, by: str, wait_s: float) -> SweepState:
    """Ask a sweep to stop all its trials, each with a checkpoint, and wait for it.

    The process that drives it sees the request in the journal. Where none does, trials that a dead one has left running
    are asked themselves; whoever resumes the sweep goes on with them.

    Args:
        sweep: its directory.
        by: who asks; goes into the journals.
        wait_s: how long to wait until nothing drives the sweep any more.

    Returns:
        The state after that.
    """
    with files.created_like(sweep.root), JournalWriter(sweep, OPERATOR_WRITER) as journal:
        journal.append("stop_requested", durable=True, by=by)
        if driver_pid(sweep) is None:
            for trial in _running(fold(read_events(sweep))):
                journal.append("trial_paused", durable=True, trial=trial)
                control.request_stop(sweep.trial(trial), by=by, wait_s=wait_s)
    wait_until_undriven(sweep, wait_s)
    return fold(read_events(sweep))


def _running(state: SweepState) -> list[int]:
    return [number for number, trial in state.trials.items() if trial.status == "running"]
