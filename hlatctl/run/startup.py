"""Fast starts and exits of programs, without searching for garbage where there is none. Standard library only.

Importing PyTorch creates about a million objects that live as long as the process. By default Python searches all of
them for garbage repeatedly, and once more at the end: a sixth of the start's processor time, and most of the exit's.
"""

from __future__ import annotations

import atexit
import gc
import time

_USUAL = gc.get_threshold()
#: New objects after which Python searches them for garbage; by default 700.
_SELDOM = 50_000


def begin() -> None:
    """Collect garbage rarely from now on, and not at exit. A program calls this first."""
    gc.set_threshold(_SELDOM, *_USUAL[1:])
    atexit.register(gc.freeze)


def imported() -> None:
    """Collect garbage as usual from now on, except among existing objects. Call it before work that fills memory."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


_reached_s: dict[str, float] = {}


def reached(point: str) -> None:
    """Note that the start of this process has reached a point."""
    _reached_s[point] = time.monotonic()


def since(point: str, until: str = "") -> float | None:
    """Return the seconds from one point of this process's start to another, or to now; None: it didn't reach one."""
    end_s = _reached_s.get(until) if until else time.monotonic()
    return None if end_s is None or point not in _reached_s else end_s - _reached_s[point]
