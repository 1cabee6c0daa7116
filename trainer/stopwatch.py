"""The time that a device spends on a part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Runs from its creation until :meth:`stop`."""

    def stop(self) -> None:
        """Mark the end of the work issued so far."""

    def read_s(self) -> float:
        """Return the seconds between start and end. The device must have reached the end, or it is waited for."""


class HostStopwatch:
    """The host's time.

    Args:
        wait: for the device; called at the end.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._started_s = wait, time.perf_counter()
        self._stopped_s = self._started_s

    def stop(self) -> None:
        """See :class:`Stopwatch`."""
        self._wait()
        self._stopped_s = time.perf_counter()

    def read_s(self) -> float:
        """See :class:`Stopwatch`."""
        return self._stopped_s - self._started_s


class DeviceStopwatch:
    """For a device that works behind the host: it notes the times itself, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        events = torch.get_device_module(device).Event
        self._start, self._stop = events(enable_timing=True), events(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        """See :class:`Stopwatch`."""
        self._stop.record()

    def read_s(self) -> float:
        """See :class:`Stopwatch`."""
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3
