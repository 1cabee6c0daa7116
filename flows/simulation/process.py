"""A simulated job: a script of things it does, with pauses, played on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Generator
from inspect import GEN_CREATED, getgeneratorstate
from typing import TypeAlias

from flows.runtime.clock import VirtualClock

#: Yields the seconds until it goes on; returns the exit code.
Script: TypeAlias = Generator[float, None, int]

KILLED = 137


class Struck(Exception):
    """Something befalls a job: raised inside its script, where it pauses.

    Args:
        kind: of the failure, or ``stop``.
        host: where.
    """

    def __init__(self, kind: str, host: str = "") -> None:
        super().__init__(kind)
        self.kind, self.host = kind, host


class Process:
    """One script that is being played.

    Args:
        clock: that it lives by.
        script: what it does.
        ended: told its exit code.
    """

    def __init__(self, clock: VirtualClock, script: Script, ended: Callable[[int], None]) -> None:
        self.alive = True
        self._clock, self._script, self._ended = clock, script, ended
        self._pauses = 0
        self._pause(0.0)

    def strike(self, what: Struck) -> None:
        """Have something befall it now; nothing can that has not begun, so it begins."""
        if self.alive and getgeneratorstate(self._script) == GEN_CREATED:
            self._go_on(lambda: next(self._script))
        if self.alive:
            self._go_on(lambda: self._script.throw(what))

    def kill(self) -> None:
        """End it without a word."""
        if self.alive:
            self._script.close()
            self._end(KILLED)

    def _pause(self, seconds: float) -> None:
        self._pauses += 1
        current = self._pauses

        def wake() -> None:
            if self.alive and self._pauses == current:  # nothing has befallen it meanwhile
                self._go_on(lambda: next(self._script))

        self._clock.at(self._clock.now_unix_s() + seconds, wake)

    def _go_on(self, advance: Callable[[], float]) -> None:
        try:
            self._pause(advance())
        except StopIteration as end:
            self._end(int(end.value))

    def _end(self, code: int) -> None:
        self.alive = False
        self._ended(code)
