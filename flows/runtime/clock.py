"""The clock of a flow: the machine's, or the virtual one of a dry run, which jumps from event to event.

All waiting in a flow goes through its clock. Only code that talks to Prefect or MLflow waits in real time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

#: Seconds between checks while the machine's clock waits.
_CHECK_S = 0.2


class DriverLostError(BaseException):
    """The driver of a dry run has died, as if by kill -9. It can't be caught as an Exception."""


class Clock(Protocol):
    """Time, waiting, and the threads of background work."""

    def now_unix_s(self) -> float:
        """Return the Unix time, for records."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary moment, for durations; never decreases."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def wait(self, seconds: float, check: Callable[[], object]) -> None:
        """Wait; call ``check`` repeatedly, which raises to end the wait early."""

    def wait_for_event(self, poll_s: float, job: str = "") -> None:
        """Wait at least ``poll_s`` seconds, until a job may have changed.

        Args:
            poll_s: the interval of checks in real time.
            job: its name; empty: any job.
        """

    def beside(self, work: Callable[[], T], *, most: int = 1) -> Future[T]:
        """Queue work for the threads that run alongside the flow; ``most`` of them work simultaneously."""

    def let_work(self, most: int) -> None:
        """Let this many threads do the queued work from now on; a thread that is already working finishes first."""


class RealClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers, self._most = 0, 1

    def now_unix_s(self) -> float:
        """Return the Unix time."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def wait(self, seconds: float, check: Callable[[], object]) -> None:
        """Wait, or until ``check`` raises."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _CHECK_S))
            check()

    def wait_for_event(self, poll_s: float, job: str = "") -> None:
        """Wait ``poll_s``: nothing announces changes of processes and files."""
        time.sleep(poll_s)

    def beside(self, work: Callable[[], T], *, most: int = 1) -> Future[T]:
        """Queue work; start a thread unless ``most`` are already working."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.append((future, work))
        self.let_work(most)
        return future

    def let_work(self, most: int) -> None:
        """Start threads for the queued work up to ``most``; surplus threads end after their present work."""
        with self._lock:
            self._most = most
            starts = max(0, min(most - self._workers, len(self._queue)))
            self._workers += starts
        for _ in range(starts):
            threading.Thread(target=self._work, name="evaluate").start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._workers > self._most:
                    self._workers -= 1
                    return
                future, work = self._queue.popleft()
            _settle(future, work)


@dataclass(eq=False)
class _Sleeper:
    """A thread that waits on a virtual clock; ``turn`` is set when it may continue."""

    job: str = ""
    not_before_s: float = 0.0
    late_s: float = 0.0
    turn: threading.Event = field(default_factory=threading.Event)
    lost: bool = False
    gone: bool = False


class VirtualClock:
    """Jumps from one scheduled action to the next.

    Only one thread runs at a time, the one that has the turn. It passes the turn on by waiting, and runs the actions
    that are due until another thread can continue. So a simulation's result doesn't depend on thread scheduling.
    """

    def __init__(self, start_unix_s: float) -> None:
        self._now_s = start_unix_s
        self._agenda: list[tuple[float, int, _Sleeper | Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: list[_Sleeper] = []
        self._impatient: deque[_Sleeper] = deque()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers, self._most = 0, 1

    def now_unix_s(self) -> float:
        """Return the virtual Unix time."""
        return self._now_s

    def monotonic_s(self) -> float:
        """Return the virtual Unix time, which never decreases."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        sleeper = _Sleeper()
        self._push(self._now_s + seconds, sleeper)
        self._pass_turn_on(sleeper)

    def wait(self, seconds: float, check: Callable[[], object]) -> None:
        """Let virtual time pass, then check once."""
        self.sleep(seconds)
        check()

    def wait_for_event(self, poll_s: float, job: str = "") -> None:
        """Let virtual time pass until the job is notified, and at least ``poll_s``."""
        sleeper = _Sleeper(job=job, not_before_s=self._now_s + poll_s, late_s=poll_s / 2)
        self._waiting.append(sleeper)
        self._pass_turn_on(sleeper)

    def at(self, when_unix_s: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._push(when_unix_s, action)

    def notify(self, job: str) -> None:
        """Wake the threads that wait for this job or any job, after the mean delay of a poll."""
        woken = [sleeper for sleeper in self._waiting if sleeper.job in ("", job)]
        for sleeper in woken:
            self._waiting.remove(sleeper)
            self._push(max(self._now_s + sleeper.late_s, sleeper.not_before_s), sleeper)

    def beside(self, work: Callable[[], T], *, most: int = 1) -> Future[T]:
        """Queue work; it starts when the thread that has the turn waits, unless ``most`` threads already work."""
        future: Future[T] = Future()
        self._queue.append((future, work))
        self.let_work(most)
        return future

    def let_work(self, most: int) -> None:
        """Start threads for the queued work up to ``most``, as :meth:`beside` does."""
        self._most = most
        for _ in range(min(most - self._workers, len(self._queue))):
            self._workers += 1
            sleeper = _Sleeper()
            self._push(self._now_s, sleeper)
            threading.Thread(target=self._work, args=(sleeper,), name="evaluate", daemon=True).start()

    def lose_driver(self) -> None:
        """End every waiting thread and cancel queued work: the driver's process has died."""
        for future, _ in self._queue:
            future.cancel()
        self._queue.clear()
        asleep = [entry for _, _, entry in self._agenda if isinstance(entry, _Sleeper)] + self._waiting
        self._waiting.clear()
        for sleeper in asleep:
            sleeper.lost = True
            self._push(self._now_s, sleeper)

    def _push(self, when_s: float, entry: _Sleeper | Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), entry))

    def _pass_turn_on(self, sleeper: _Sleeper) -> None:
        """Pass the turn on, and wait for this thread's next one."""
        try:
            if self._advance(sleeper):
                self._await_turn(sleeper)
        finally:
            sleeper.gone = True  # after an interrupt too: it must not get another turn
        if sleeper.lost:
            raise DriverLostError

    def _await_turn(self, sleeper: _Sleeper) -> None:
        try:
            sleeper.turn.wait()
        except BaseException:  # an interrupt: take the turn back from the other thread first
            self._impatient.append(sleeper)
            sleeper.turn.wait()
            raise

    def _advance(self, own: _Sleeper | None) -> bool:
        """Run due actions until a thread can continue; return whether it is another thread."""
        while True:
            if self._impatient:
                entry: _Sleeper | Callable[[], None] = self._impatient.popleft()
            elif self._agenda:
                when_s, _, entry = heapq.heappop(self._agenda)
                self._now_s = max(self._now_s, when_s)
            elif own is None and self._waiting:
                self._push(self._now_s, self._waiting.pop())  # it will find nothing left to wait for
                continue
            else:
                raise RuntimeError("the flow waits, but nothing is left to happen on its simulated cluster")
            if entry is own:
                return False
            if not isinstance(entry, _Sleeper):
                entry()
            elif not entry.gone:
                entry.gone = True
                entry.turn.set()
                return True

    def _work(self, sleeper: _Sleeper) -> None:
        sleeper.turn.wait()
        while self._queue and self._workers <= self._most:
            _settle(*self._queue.popleft())
        self._workers -= 1
        self.notify("beside")  # for threads that wait for the results
        self._advance(None)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # like an executor: the future raises it
        future.set_exception(error)
