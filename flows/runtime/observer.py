"""Shows a flow's progress: the interface to the terminal, and the driver's log.

``logs/driver.log`` contains the messages of the terminal with times. It is not part of the journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from conf.schema import Config
from hlatctl.run.state import RunState
from hlatctl.units import one_line, utc


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
    """Appends lines to the driver's log. If the log can't be written, as on a full disk, lines are dropped silently.

    Args:
        path: log file.
        now_unix_s: clock for the times.
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
