"""A run's current state: its journal, its configuration, and whether a process drives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hlatctl.run import sweep
from hlatctl.run.errors import HlatctlError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event, JournalTail, no_steps, read_events
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.reader import INTERRUPTED, RunReader
from hlatctl.run.state import RunState

if TYPE_CHECKING:
    from conf.schema import Config

    _Reader = RunReader[Config]
else:
    _Reader = RunReader


class RunView(_Reader):
    """A run with its configuration."""

    def __init__(self, run: RunPaths) -> None:
        from conf.of_run import of_run

        super().__init__(run, of_run)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run. None if its configuration can't be read."""
        return self.config.total_steps if self.config else None


def view_run(run: RunPaths) -> RunView:
    """Return a run as it is now. A folder that can't be read gets the status ``damaged``."""
    return RunView(run).refresh()


def read_without_steps(run: RunPaths) -> tuple[RunState, Iterator[Event]]:
    """Return a run's state and the events that it describes, without the steps, which the state has.

    Raises:
        StorageError: a file of the journal can't be read.
    """
    state = read_state(run)
    events = JournalTail(run, wanted=no_steps).stream()
    return state, (event for event in events if event["time_unix_s"] <= state.last_event_unix_s)


def view_sweep(paths: SweepPaths) -> tuple[sweep.SweepState, int | None]:
    """Return a sweep's state and the process that drives it. Its status is ``interrupted`` if it lost its driver.

    It is ``stopping`` or ``stopped`` after a request, which other processes obey for a driver that is dead.
    """
    state, pid = sweep.fold(read_events(paths)), driver_pid(paths)
    if state.status == "running" and (state.stop_requested or pid is None):
        is_paused = state.stop_requested and not state.count("running", "stopping")
        state.status = "stopping" if pid is not None else "stopped" if is_paused else INTERRUPTED
    return state, pid


def sweep_at_rest(state: sweep.SweepState, pid: int | None) -> bool:
    """Return whether there is nothing to stop of a sweep that ``view_sweep`` has returned."""
    return pid is None and state.status in ("finished", "failed", "stopped") and not state.count("running")


def is_simulated(run: RunPaths) -> bool:
    """Return whether a dry run made a run or a sweep. False if its folder can't be read."""
    if isinstance(run, SweepPaths):
        return sweep.fold(read_events(run)).simulated
    from conf.of_run import of_run

    try:
        return of_run(run).cluster.jobs_run == "nowhere"  # much less to read than a long journal
    except HlatctlError:
        return False
