"""The driver's orders to a running attempt: amendments of the run's configuration, and profiles.

Only rank 0 reads the driver's file. It notifies the others through the signal that each step's metrics carry, so that
all begin or end with the same step.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

from hlatctl.run import files
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import ProfileOrder, RunPaths
from trainer.backends.base import ENDS, NEWS

#: Interval between reads of the file.
_LOOK_EVERY_S = 2.0
#: While the driver wants training to end, it touches the file more often than this. Without a driver, training
#: continues, because nothing would start the next attempt.
_FRESH_S = 120.0


class Orders:
    """The orders of one attempt. Reads one small file, at most once in two seconds.

    Args:
        attempt: number of the attempt.
        ahead: number of steps between the signal and its effect on every rank.
    """

    def __init__(self, run: RunPaths, attempt: int, *, ahead: int = 0) -> None:
        self._path, self._ahead = run.orders(attempt), ahead
        self._looked_s = self._changed_s = -_FRESH_S
        self._version: tuple[int, int] = (0, 0)
        self._order: dict[str, Any] = {}
        self._taken: set[int] = set()
        self._profiled = 0

    def signal(self, step: int) -> int:
        """Return what rank 0 adds to the signal of a step."""
        self._look()
        if not self._order:
            return 0
        end, is_fresh = self._order["end_after_step"], time.monotonic() - self._changed_s < _FRESH_S
        ends = end is not None and step + self._ahead >= end and is_fresh
        return ENDS * ends + NEWS * bool(set(self._order["numbers"]) - self._taken or self._new_profile())

    def take(self) -> tuple[list[int], dict[str, Any], dict[str, Any] | None]:
        """Return the numbers of the new amendments, the values of all amendments by key, and a profile if it is new."""
        new = sorted(set(self._order["numbers"]) - self._taken)
        self._taken.update(new)
        profile = self._new_profile()
        self._profiled = profile["number"] if profile else self._profiled
        return new, self._order["values"], profile

    def _new_profile(self) -> dict[str, Any] | None:
        profile: dict[str, Any] | None = self._order["profile"]
        return profile if profile and profile["number"] > self._profiled else None

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            status = os.stat(self._path)
            version = (status.st_mtime_ns, status.st_ino)
            if version != self._version:
                order = files.read_json(self._path)
                profile = order["profile"]
                self._order = {
                    **{name: order[name] for name in ("numbers", "values", "end_after_step")},
                    "profile": asdict(ProfileOrder.of(profile)) if profile else None,
                }
                self._version, self._changed_s = version, now_s
        except (OSError, *DAMAGED):  # it is written again, or not at all
            return
