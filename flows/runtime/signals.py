"""Ctrl-C and SIGTERM that are kept until they have been acted on.

A handler raises wherever the main thread happens to be; inside a destructor, or inside a library that takes the
exception for its own, it is lost. So it is also remembered, and whoever waits in a loop asks.
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
    """The requests to end that this process has got and not answered yet."""

    def __init__(self) -> None:
        self._pending: signal.Signals | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember requests while this lasts; what would have handled them does so too. The main thread's business."""
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
        """Raise what a request has raised already, if that has been lost. Does nothing in other threads."""
        if self._pending is None or threading.current_thread() is not threading.main_thread():
            return
        number = self.take()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            raise SystemExit(128 + number)

    def take(self) -> signal.Signals | None:
        """The request, which is answered from now on."""
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
