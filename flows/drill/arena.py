"""A run under fire: its journal as it grows, its head, its processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import conf.load
from flows import control
from flows.launch.base import Handle
from flows.launch.local import LocalLauncher
from flows.runtime import detached
from hlatctl.run import processes
from hlatctl.run.errors import LaunchError, TrainingError
from hlatctl.run.fold import apply
from hlatctl.run.journal import DRILL_WRITER, Event, JournalTail, JournalWriter
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import Identity
from hlatctl.run.state import AttemptState, RunState

_T = TypeVar("_T")

_POLL_S = 0.02
#: On few cores, MLflow and Prefect have to come up beside training that takes all of them.
_YIELDING = ("nice", "-n", "5")
#: Waiting for anything ends after this and so many cold starts.
_PATIENCE_S, _PATIENCE_STARTS = 60.0, 8.0
#: Before the first start has been seen.
_FIRST_START_S = 1800.0
_STOP_S = 120.0


class NotRecovered(TrainingError):
    """What had to follow a fault did not."""


class NotTried(Exception):
    """A fault that can't be done to this run; says why."""


class Arena:
    """A run that is driven by a head process of its own, to be looked at and to be broken.

    Args:
        run: made, and not begun.
        journal: the drill's own, to enter faults in.
    """

    def __init__(self, run: RunPaths, journal: JournalWriter) -> None:
        self.run, self.config = run, conf.load.load(run.config)
        self.state, self.events = RunState(), list[Event]()
        self.cold_start_s = 0.0
        """From the head's start to the first optimizer step."""
        self._journal, self._tail, self._launcher = journal, JournalTail(run), LocalLauncher()
        self._driven = False
        self._struck_step = 0

    def start(self) -> None:
        """Start the run and wait for its first step."""
        started_unix_s = time.time()
        self.drive()
        step = self.wait_for_event("the first step", 0, lambda event: event["kind"] == "step", _FIRST_START_S)
        self.cold_start_s = step["time_unix_s"] - started_unix_s

    def drive(self) -> None:
        """Start a head process."""
        detached.start_driver(self.run, inside=_YIELDING)
        self._driven = True

    def revive(self) -> None:
        """Bring a run that has ended, or that a fault has left without a head, back to training, if that can be."""
        if driver_pid(self.run) is None:
            with suppress(LaunchError):
                self.drive()
        self._driven = True

    def under_way(self) -> None:
        """Wait until there are two checkpoints, the newest of this attempt, and steps that came after it.

        All of them beyond the step of the last fault: the restart policy takes two like failures of one step for one
        fault that will come again.
        """

        def ready() -> bool:
            attempt, checkpoints = self.attempt, self.state.checkpoints
            newest = attempt.newest_checkpoint
            good = len(checkpoints) > 1 and newest == checkpoints[-1]
            return good and attempt.last_step > newest > self._struck_step

        self.wait_until("two checkpoints and a step beyond them", ready)

    def look(self) -> None:
        """Take in what is new in the journal."""
        for event in self._tail.read_new():
            apply(self.state, event)
            self.events.append(event)

    @property
    def attempt(self) -> AttemptState:
        """The newest attempt."""
        if self.state.attempt is None:
            raise NotRecovered("training has not been started")
        return self.state.attempt

    def strike(self, fault: str, blow: Callable[[], object]) -> tuple[float, int]:
        """Do a fault to the run; its Unix time, and the place in ``events`` from which on its consequences stand."""
        self.look()
        event = self._journal.append("fault_injected", durable=True, fault=fault, run_id=self.run.run_id)
        mark, self._struck_step = len(self.events), self.state.step
        blow()
        return float(event["time_unix_s"]), mark

    def wait_for_event(
        self, what: str, mark: int, wanted: Callable[[Event], bool], patience_s: float | None = None
    ) -> Event:
        """Wait for the first event from a place on that is the wanted one."""
        return self.wait_until(what, lambda: next((e for e in self.events[mark:] if wanted(e)), None), patience_s)

    def wait_until(self, what: str, found: Callable[[], _T | None], patience_s: float | None = None) -> _T:
        """Wait until something is found.

        Raises:
            NotRecovered: the run has ended, or it took too long.
        """
        limit_s = patience_s or _PATIENCE_S + self.config.recovery.hang_floor_s + _PATIENCE_STARTS * self.cold_start_s
        deadline = time.monotonic() + limit_s
        while True:
            driven = driver_pid(self.run) is not None
            self.look()
            if value := found():
                return value
            if self._driven and not driven:
                ended = f"the run {self.state.status}" if self.state.status != "running" else "its head process died"
                raise NotRecovered(": ".join(filter(None, [f"no sign of {what}; {ended}", self.state.message])))
            if time.monotonic() > deadline:
                raise NotRecovered(f"no sign of {what} within {limit_s:.0f} s")
            time.sleep(_POLL_S)

    def head(self) -> Identity:
        """The process that drives the run; from here on it may be gone without that being a failure."""
        head = processes.identify(driver_pid(self.run) or 0)
        if head is None:
            raise NotRecovered("nobody drives the run")
        self._driven = False
        return head

    def job(self) -> Identity:
        """The training job's program on this node."""
        process = self._launcher.process(Handle.from_json(self.attempt.handle))
        if process is None:
            raise NotRecovered("the training job has no process")
        return process

    def process(self) -> Identity:
        """One training process: that of the last rank."""
        found = processes.ranks(self.job().pid)
        if not found:
            raise NotRecovered("no training process is left")
        return found[max(found)]

    def stop(self) -> None:
        """Stop the run with a checkpoint, whatever state it is in."""
        self._driven = False
        control.request_stop(self.run, by=DRILL_WRITER, wait_s=_STOP_S)
        self.look()
