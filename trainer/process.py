"""What a process of a launched job does first, before it imports anything heavy. Standard library only."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def show_stacks_when_asked() -> None:
    """Print the stacks of all threads to stderr at SIGUSR1, even from the middle of a collective that never ends."""
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def die_with_launcher() -> None:
    """End this process when the torchrun that started it ends, however it ends.

    Torchrun puts each process into a session of its own, so a signal to the job's process group never gets here, and
    one that outlived a killed torchrun would go on writing beside its successor. Linux only; elsewhere nothing.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher == 1 or os.getppid() != launcher:  # it has died already
        sys.exit(f"process {os.getpid()}: the torchrun that started it is gone")
