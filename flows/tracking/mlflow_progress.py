"""How far a copy to MLflow is: steps, their rate, and the time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from hlatctl.units import duration

#: Time between two lines.
_EVERY_S = 5.0
#: The rate is that of the newest lines: it depends on what else the machine does.
_NEWEST = 6


class Progress:
    """Prints a line every 5 s.

    Args:
        total_bytes: of the journal.
        say: called with each line.
        now_s: the clock.
    """

    def __init__(
        self, total_bytes: int, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_bytes, self._say, self._now_s = total_bytes, say, now_s
        self._points: deque[tuple[float, int, int]] = deque(maxlen=_NEWEST)

    def reached(self, step: int, done_bytes: int) -> None:
        """Say that everything up to this step is copied, and so many bytes of the journal."""
        now_s = self._now_s()
        if not self._points:
            self._points.append((now_s, step, done_bytes))
            return
        if now_s - self._points[-1][0] < _EVERY_S:
            return
        self._points.append((now_s, step, done_bytes))
        since_s, since_step, since_bytes = self._points[0]
        share = done_bytes / max(self._total_bytes, done_bytes, 1)
        text = f"step {step:,} ({share:.0%} of the journal), {(step - since_step) / (now_s - since_s):,.0f} steps/s"
        if done_bytes > since_bytes:
            left_s = (now_s - since_s) / (done_bytes - since_bytes) * max(0, self._total_bytes - done_bytes)
            text += f", {duration(left_s)} left"
        self._say(text)
