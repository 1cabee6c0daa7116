"""Waiting for a condition, in tests that start processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

#: Far longer than anything takes on an idle machine.
WAIT_S = 900.0


def wait_for(true: Callable[[], _T], timeout_s: float = WAIT_S) -> _T:
    """Wait until a function returns something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return value
