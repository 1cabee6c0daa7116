"""A run's current state: its journal, its configuration, and whether a process drives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlatctl.run import sweep
from hlatctl.run.errors import HlatctlError, StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event, JournalTail, no_steps, read_events
from hlatctl.run.lease import driver, driver_pid
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.state import RunState

if TYPE_CHECKING:
    from conf.schema import Config

#: Status of a run or sweep that is running according to its journal, but has no driver.
INTERRUPTED = "interrupted"
#: Status of a run whose checkpoints were removed.
ARCHIVED = "archived"
_ENDED = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class RunView:
    """A run's state, as far as its folder can be read.

    Args:
        status: as in ``RunState``, or ``interrupted`` (no process drives it), ``stopping``, ``damaged``.
        driver_pid: id of the driver's process.
        config: None if it can't be read; ``problem`` says why.
        driver_elsewhere: the driver's process and host if it is on another host; else empty.
    """

    run: RunPaths
    state: RunState
    status: str
    driver_pid: int | None
    config: Config | None
    problem: str = ""
    driver_elsewhere: str = ""

    @property
    def ended(self) -> bool:
        """Whether no process drives the run."""
        return self.driver_pid is None

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing to stop: no driver, and no job left by a dead driver."""
        attempt = self.state.attempt
        job_ended = attempt is None or attempt.ended_unix_s is not None
        return self.ended and (self.status == ARCHIVED or (job_ended and self.status in _ENDED))

    @property
    def can_resume(self) -> bool:
        """Whether `hlatctl resume` would continue the run."""
        return self.ended and self.status not in ("finished", ARCHIVED, "damaged")

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run. None if its configuration can't be read."""
        return self.config.total_steps if self.config else None


def view_run(run: RunPaths) -> RunView:
    """Return a run's state. A folder that can't be read gets the status ``damaged``."""
    driven_by = driver(run)
    pid = driven_by.pid if driven_by else None
    elsewhere = str(driven_by) if driven_by and driven_by.is_elsewhere else ""
    config, problem = read_config(run)
    try:
        state = read_state(run)
    except StorageError as error:
        return RunView(run, RunState(), "damaged", pid, config, error.message, elsewhere)
    status = "damaged" if problem else status_of(state, is_driven=pid is not None)
    return RunView(run, state, status, pid, config, problem, elsewhere)


def read_without_steps(run: RunPaths) -> tuple[RunState, Iterator[Event]]:
    """Return a run's state and the events that it describes, without the steps, which the state has.

    Raises:
        StorageError: a file of the journal can't be read.
    """
    state = read_state(run)
    events = JournalTail(run, wanted=no_steps).stream()
    return state, (event for event in events if event["time_unix_s"] <= state.last_event_unix_s)


def view_sweep(paths: SweepPaths) -> tuple[sweep.SweepState, int | None]:
    """Return a sweep's state and the process that drives it. Its status is ``interrupted`` if it lost its driver."""
    state, pid = sweep.fold(read_events(paths)), driver_pid(paths)
    if state.status == "running" and pid is None:
        state.status = INTERRUPTED
    return state, pid


def is_simulated(run: RunPaths) -> bool:
    """Return whether a dry run made a run or a sweep. False if its folder can't be read."""
    if isinstance(run, SweepPaths):
        return sweep.fold(read_events(run)).simulated
    config, _ = read_config(run)  # much less to read than a long journal
    return config is not None and config.cluster.launcher == "mock"


def status_of(state: RunState, *, is_driven: bool) -> str:
    """Return a run's status, from its journal and whether a process drives it."""
    if state.archived and not is_driven:
        return ARCHIVED
    if state.status in _ENDED or (not is_driven and state.status != "running"):
        return state.status
    if is_driven:
        return "stopping" if state.stop_requested else "running"
    # A driver that stops on a full disk can't journal its end. Without an open attempt, nothing is running.
    attempt = state.attempt
    is_training = attempt is not None and attempt.ended_unix_s is None and not state.train_stopped
    return "stopped" if state.stop_requested and not is_training else INTERRUPTED


def read_config(run: RunPaths) -> tuple[Config | None, str]:
    """Return a run's configuration, or None and why it can't be read."""
    from conf.of_run import of_run

    try:
        return of_run(run), ""
    except HlatctlError as error:
        return None, error.message
