"""A simulated job: a script with pauses that runs on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Generator
from inspect import GEN_CREATED, getgeneratorstate
from typing import TypeAlias

from flows.runtime.clock import VirtualClock

#: Yields the seconds to pause; returns the exit code.
Script: TypeAlias = Generator[float, None, int]

KILLED = 137


class Fault(Exception):
    """A failure of a job, or a request to stop; raised inside its script, where it pauses.

    Args:
        kind: of the failure, or ``stop``.
        host: of the failure; empty: no host.
    """

    def __init__(self, kind: str, host: str = "") -> None:
        super().__init__(kind)
        self.kind, self.host = kind, host


class Process:
    """A running script.

    Args:
        clock: the virtual clock.
        script: what it does.
        ended: takes its exit code.
    """

    def __init__(self, clock: VirtualClock, script: Script, ended: Callable[[int], None]) -> None:
        self.alive = True
        self._clock, self._script, self._ended = clock, script, ended
        self._pauses = 0
        self._pause(0.0)

    def inject(self, fault: Fault) -> None:
        """Raise a fault in the script now, after starting it if it hasn't started."""
        if self.alive and getgeneratorstate(self._script) == GEN_CREATED:
            self._advance(lambda: next(self._script))
        if self.alive:
            self._advance(lambda: self._script.throw(fault))

    def kill(self) -> None:
        """End it at once, as by SIGKILL."""
        if self.alive:
            self._script.close()
            self._end(KILLED)

    def _pause(self, seconds: float) -> None:
        self._pauses += 1
        current = self._pauses

        def wake() -> None:
            if self.alive and self._pauses == current:  # no fault has come meanwhile
                self._advance(lambda: next(self._script))

        self._clock.at(self._clock.now_unix_s() + seconds, wake)

    def _advance(self, advance: Callable[[], float]) -> None:
        try:
            self._pause(advance())
        except StopIteration as end:
            self._end(int(end.value))

    def _end(self, code: int) -> None:
        self.alive = False
        self._ended(code)
