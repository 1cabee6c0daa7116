"""Asking a sweep to stop, from any process that shares its runs folder."""

from __future__ import annotations

from flows import control
from hlatctl.run import files, stopping
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.lease import driver_pid, wait_until_undriven
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import SweepState, fold


def request_stop(sweep: SweepPaths, *, by: str, wait_s: float) -> SweepState:
    """Ask a sweep to stop all its trials, each with a checkpoint, and wait for it.

    The sweep's driver reads the request from the journal. If the driver is dead, the trials that still run are asked
    directly; when the sweep is resumed, they continue.

    Args:
        sweep: its directory.
        by: the name of the requester; written to the journals.
        wait_s: seconds to wait for the driver to end.

    Returns:
        The state after that.
    """
    with files.created_like(sweep.root), JournalWriter(sweep, OPERATOR_WRITER) as journal:
        stopping.request(sweep, journal, by=by)
        if driver_pid(sweep) is None:
            for number, trial in fold(read_events(sweep)).trials.items():
                if trial.status == "running":
                    journal.append("trial_paused", durable=True, trial=number)
                    control.request_stop(sweep.trial(number), by=by, wait_s=wait_s)
    wait_until_undriven(sweep, wait_s)
    return fold(read_events(sweep))
