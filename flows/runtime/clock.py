"""The clock that a flow lives by: the machine's, or a rehearsal's, on which nothing is ever waited for.

Whoever waits in a flow asks the clock to. What talks to a real server, Prefect's or MLflow's, waits for that one in
real time and not here.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

#: How often a wait of the machine's clock looks whether to go on.
_LOOK_S = 0.2


class DriverLostError(BaseException):
    """A rehearsal's head has died here, as of kill -9: nothing that could have handled it is left."""


class Clock(Protocol):
    """What time it is, and waiting."""

    def now_unix_s(self) -> float:
        """The time of day, for what is written down."""

    def monotonic_s(self) -> float:
        """For durations: it is never set back."""

    def sleep(self, seconds: float) -> None:
        """Wait so long."""

    def wait(self, seconds: float, look: Callable[[], object]) -> None:
        """Wait so long, and look now and then for what ends the wait early, by raising.

        Args:
            seconds: the whole wait.
            look: raises to end it.
        """

    def wait_for_event(self, poll_s: float, of: str = "") -> None:
        """Wait until it is worth looking again: at least so long.

        Args:
            poll_s: how soon.
            of: the job that is waited for; empty: any.
        """

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the one thread that goes on beside the flow's own."""


class RealClock:
    """The machine's."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def now_unix_s(self) -> float:
        """The time of day."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def wait(self, seconds: float, look: Callable[[], object]) -> None:
        """Wait so long, or until the look raises."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
            look()

    def wait_for_event(self, poll_s: float, of: str = "") -> None:
        """Wait for the next look: processes and files tell nobody that they have changed."""
        time.sleep(poll_s)

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the one thread."""
        self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluate")
        return self._pool.submit(work)


@dataclass(eq=False)
class _Sleeper:
    """A thread that waits on a virtual clock; ``turn`` is set when it may go on."""

    of: str = ""
    not_before_s: float = 0.0
    late_s: float = 0.0
    turn: threading.Event = field(default_factory=threading.Event)
    lost: bool = False
    gone: bool = False


class VirtualClock:
    """Jumps from one thing that happens to the next.

    One thread at a time has the turn, and only that one runs; it passes it on by waiting. So a course of events depends
    on nothing but what happens in it. Whoever waits does, meanwhile, what is on the agenda.
    """

    def __init__(self, start_unix_s: float) -> None:
        self._now_s = start_unix_s
        self._agenda: list[tuple[float, int, _Sleeper | Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: list[_Sleeper] = []
        self._impatient: deque[_Sleeper] = deque()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._beside_works = False

    def now_unix_s(self) -> float:
        """The virtual time of day."""
        return self._now_s

    def monotonic_s(self) -> float:
        """The same: it is never set back."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let so much happen."""
        sleeper = _Sleeper()
        self._push(self._now_s + seconds, sleeper)
        self._pass_turn_on(sleeper)

    def wait(self, seconds: float, look: Callable[[], object]) -> None:
        """Let so much happen; it takes no time, so one look is enough."""
        self.sleep(seconds)
        look()

    def wait_for_event(self, poll_s: float, of: str = "") -> None:
        """Let happen what does until there is news, and ``poll_s`` in any case."""
        sleeper = _Sleeper(of=of, not_before_s=self._now_s + poll_s, late_s=poll_s / 2)
        self._waiting.append(sleeper)
        self._pass_turn_on(sleeper)

    def at(self, when_unix_s: float, action: Callable[[], None]) -> None:
        """Have something happen at a time."""
        self._push(when_unix_s, action)

    def notify(self, of: str) -> None:
        """Wake those who wait for a job, and those who wait for anything, as late as a look now and then finds it."""
        woken = [sleeper for sleeper in self._waiting if sleeper.of in ("", of)]
        for sleeper in woken:
            self._waiting.remove(sleeper)
            self._push(max(self._now_s + sleeper.late_s, sleeper.not_before_s), sleeper)

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the one thread; it begins when whoever has the turn waits."""
        future: Future[T] = Future()
        self._queue.append((future, work))
        if not self._beside_works:
            self._beside_works = True
            sleeper = _Sleeper()
            self._push(self._now_s, sleeper)
            threading.Thread(target=self._work, args=(sleeper,), name="evaluate", daemon=True).start()
        return future

    def lose_driver(self) -> None:
        """End every thread that waits now, and what has been queued: the head's process has died."""
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
        """Wait for the next turn of this thread."""
        try:
            if self._advance(sleeper):
                self._await_turn(sleeper)
        finally:
            sleeper.gone = True  # after an interrupt too: a turn that it got now would be lost
        if sleeper.lost:
            raise DriverLostError

    def _await_turn(self, sleeper: _Sleeper) -> None:
        try:
            sleeper.turn.wait()
        except BaseException:  # an interrupt; another thread has the turn, and is asked for it
            self._impatient.append(sleeper)
            sleeper.turn.wait()
            raise

    def _advance(self, own: _Sleeper | None) -> bool:
        """Do what is on the agenda until a thread may go on; whether that is another one than this."""
        while True:
            if self._impatient:
                entry: _Sleeper | Callable[[], None] = self._impatient.popleft()
            elif self._agenda:
                when_s, _, entry = heapq.heappop(self._agenda)
                self._now_s = max(self._now_s, when_s)
            elif own is None and self._waiting:
                self._push(self._now_s, self._waiting.pop())  # which finds that out
                continue
            else:
                raise RuntimeError("the flow waits, and nothing is left to happen on its simulated cluster")
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
        while self._queue:
            future, work = self._queue.popleft()
            try:
                future.set_result(work())
            except BaseException as error:  # as an executor does: whoever asks for the result gets it
                future.set_exception(error)
        self._beside_works = False
        self.notify("beside")  # whoever waits for the results
        self._advance(None)
