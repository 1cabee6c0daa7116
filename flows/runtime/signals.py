"""Remembers requests to end (Ctrl-C and SIGTERM) until the flow has handled them.

A signal handler raises wherever the main thread happens to be. In a destructor, or in a library that catches the
exception, it is lost. So the request is also remembered, and loops that wait check for it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_KEPT = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """The request to end that this process has received but not handled."""

    def __init__(self) -> None:
        self._pending: signal.Signals | None = None

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
            if callable(handler):
                handler(number, frame)
            elif handler == signal.SIG_DFL:
                raise SystemExit(128 + number)

        return remember
