"""Signal handling of a job's processes. Standard library only, so that it is set up before heavy imports."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopRequest:
    """Whether SIGTERM has asked this process to stop."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def show_stacks_when_asked() -> None:
    """Print the stacks of all threads to stderr on SIGUSR1, even during a collective that hangs."""
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def die_with_launcher() -> None:
    """End this process when the torchrun that started it dies. Linux only; elsewhere do nothing.

    Torchrun starts each process in a session of its own, so signals to the job's process group don't reach it. Without
    this, a process could survive a killed torchrun and write beside the next attempt.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher == 1 or os.getppid() != launcher:  # it died before prctl
        sys.exit(f"process {os.getpid()}: the torchrun that started it is gone")
