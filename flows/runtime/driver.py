"""What a driver's process has: its clock, requests to end it, and the observer to which it reports.

All waiting in a flow goes through its clock, except in code that talks to Prefect or MLflow. A dry run has a virtual
clock (``flows.simulation.cluster``).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from conf.schema import Config
from hlatctl.run.state import RunState
from hlatctl.units import one_line, utc

T = TypeVar("T")

#: Seconds between checks while the machine's clock waits, and between looks for the end of a job.
_CHECK_S, _LOOK_S = 0.2, 0.02


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

    def wait_for_event(self, poll_s: float, job: str = "", has_ended: Callable[[], bool] = lambda: False) -> None:
        """Wait ``poll_s`` seconds, or at least that long until this job or, without a name, any job may have changed.

        Args:
            has_ended: whether the job's end is known, which ends the wait at once; costs microseconds.
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

    def wait_for_event(self, poll_s: float, job: str = "", has_ended: Callable[[], bool] = lambda: False) -> None:
        """Wait ``poll_s``, or until the job has ended: nothing announces changes of processes and files."""
        deadline_s = time.monotonic() + poll_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not has_ended():
            time.sleep(min(left_s, _LOOK_S))

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
            settle(future, work)


def settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Give a future the result or the error of its work, as an executor does."""
    try:
        future.set_result(work())
    except BaseException as error:  # the future raises it
        future.set_exception(error)


_KEPT = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Remembers requests to end (Ctrl-C and SIGTERM) until the flow has handled them.

    A signal handler raises wherever the main thread happens to be. In a destructor, or in a library that catches the
    exception, it is lost. So the request is also remembered, and loops that wait check for it.
    """

    def __init__(self) -> None:
        self._pending: signal.Signals | None = None
        #: A SIGTERM has come.
        self.terminated = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember requests during the block, and call the former handlers too. Does nothing in other threads."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _KEPT}
        try:
            for number, handler in before.items():
                signal.signal(number, self._remember(handler))
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise the exception of a request that was not handled. Does nothing in other threads."""
        if self._pending is None or threading.current_thread() is not threading.main_thread():
            return
        number = self.take()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            raise SystemExit(128 + number)

    def take(self) -> signal.Signals | None:
        """Return the pending request, or None, and mark it as handled."""
        number, self._pending = self._pending, None
        return number

    def _remember(self, handler: Any) -> Callable[[int, FrameType | None], None]:
        def remember(number: int, frame: FrameType | None) -> None:
            self._pending = signal.Signals(number)
            self.terminated |= number == signal.SIGTERM
            if callable(handler):
                handler(number, frame)
            elif handler == signal.SIG_DFL:
                raise SystemExit(128 + number)

        return remember


class Observer(Protocol):
    """Shows a flow to a person. The flow calls it from the thread that drives it."""

    def update(self, state: RunState, config: Config) -> None:
        """Show the run's state; called about twice a second while training."""

    def message(self, text: str) -> None:
        """Show one line of text."""


class SilentObserver:
    """Shows nothing."""

    def update(self, state: RunState, config: Config) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""


#: A larger log is moved to ``driver.log.1``, which replaces an earlier one.
_MOST_BYTES = 8 << 20


class DriverLog:
    """Appends the messages of the terminal, with times, to the driver's log.

    If it can't be written, as on a full disk, lines are dropped silently.
    """

    def __init__(self, path: Path, now_unix_s: Callable[[], float]) -> None:
        self._path, self._now_unix_s = path, now_unix_s

    def write(self, text: str) -> None:
        """Append a line."""
        line = f"{utc(self._now_unix_s())}  {one_line(text)}\n".encode(errors="replace")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link, and not into a FIFO that nobody reads.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o666)
            try:
                os.write(file, line)
                is_full = os.fstat(file).st_size > _MOST_BYTES
            finally:
                os.close(file)
            if is_full:
                self._path.replace(self._path.with_suffix(".log.1"))
