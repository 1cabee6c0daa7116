"""Handle the signals of a job's processes. Imports little, so that it is set up before heavy imports."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import FrameType

from hlatctl.run import processes, rank_output


class StopRequest:
    """Whether SIGTERM told this process to stop."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        # Python restores the default action of handled signals when it ends, when a second request could still arrive.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def show_stacks_when_asked() -> None:
    """Print the stacks of all threads to stderr on SIGUSR1, even during a collective that hangs.

    Then the earlier handler runs (``trainer.step.evidence``).
    """
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def follow_launcher() -> None:
    """Accept requests to stop, print to the node's log, and end when torchrun dies (Linux only).

    ``hlatctl.node`` starts torchrun with these signals blocked, and torchrun's processes inherit that. Torchrun starts
    each process in its own session, so signals to the job's process group don't reach it. A process that survived
    a killed torchrun could write during the next attempt.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    rank_output.send_to_node_log()
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    processes.end_with_parent(launcher)
    # When a parent dies, its process gets a parent outside the job: init, or a scheduler's program.
    if processes.job_of(launcher) != os.environ.get(processes.JOB_ENV, ""):
        sys.exit(f"process {os.getpid()}: the torchrun that started it is gone")
