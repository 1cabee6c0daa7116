"""Waiting for a condition, in tests that start processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

#: Far longer than anything takes on an idle machine.
WAIT_S = 900.0
#: A pause between two looks is this many times as long as a look, which may start a program.
_PAUSE_LOOKS, _LEAST_PAUSE_S, _MOST_PAUSE_S = 9, 0.02, 0.5


def wait_for(true: Callable[[], _T], timeout_s: float = WAIT_S) -> _T:
    """Wait until a function returns something true, and return that.

    Looking takes a tenth of a processor at most: what is waited for needs it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        before = time.monotonic()
        if value := true():
            return value
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(min(max(_LEAST_PAUSE_S, _PAUSE_LOOKS * (time.monotonic() - before)), _MOST_PAUSE_S))
