"""How a drill reaches the processes of a training job: on this machine, or on the nodes of a Slurm cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Protocol

from conf.schema import Config
from flows.drill import on_node
from flows.launch.base import Handle
from flows.launch.local import LocalLauncher
from flows.launch.slurm.launcher import SlurmLauncher
from hlatctl.run import processes
from hlatctl.run.errors import LaunchError

#: What these launchers' jobs can be reached with; a drill of any other is refused.
LAUNCHERS = ("local", "slurm")


class Reach(Protocol):
    """Sends signals to a training job. The methods raise LaunchError if there is nothing to signal."""

    def rank(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the training process of the last rank."""

    def program(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the program of the last node."""

    def preempt(self, handle: Handle) -> None:
        """Ask the job to stop, as a scheduler does to reclaim its nodes."""

    def cancel(self, handle: Handle) -> None:
        """Cancel the job, as an administrator does."""


class Here:
    """Jobs of this machine."""

    def rank(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the training process of the last rank."""
        processes.send(last_rank(handle), number)

    def program(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the job's node program."""
        processes.send(node_program(handle), number)

    def preempt(self, handle: Handle) -> None:
        """Ask the job to stop through its node program."""
        self.program(handle, signal.SIGTERM)

    def cancel(self, handle: Handle) -> None:
        """Raise LaunchError: there is no scheduler."""
        raise LaunchError("a job of this machine has no scheduler that could cancel it")


class OnSlurm:
    """Jobs of a Slurm cluster: signals are sent by a step beside training, on the job's last node.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._launcher, self._last = SlurmLauncher(config.cluster), config.cluster.nodes - 1

    def rank(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the training process of the last rank."""
        self._on_last_node(handle, number, on_node.RANK)

    def program(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the program of the last node."""
        self._on_last_node(handle, number, on_node.PROGRAM)

    def preempt(self, handle: Handle) -> None:
        """Signal all processes of the job, as Slurm does."""
        self._launcher.signal(handle, signal.SIGTERM)

    def cancel(self, handle: Handle) -> None:
        """Cancel the job."""
        self._launcher.signal(handle, None)

    def _on_last_node(self, handle: Handle, number: signal.Signals, what: str) -> None:
        base = Path(handle.launch_dir) / handle.name
        argv = ("-m", "flows.drill.on_node", os.fspath(base), str(self._last), what, number.name)
        self._launcher.run_beside(handle, self._last, *argv)


def reach_for(config: Config) -> Reach:
    """Return how to reach the jobs of a run."""
    return OnSlurm(config) if config.cluster.launcher == "slurm" else Here()


def node_program(handle: Handle) -> processes.Identity:
    """Return the process of a job's node program on this machine.

    Raises:
        LaunchError: it has none.
    """
    process = LocalLauncher().process(handle)
    if process is None:
        raise LaunchError("the training job has no process")
    return process


def last_rank(handle: Handle) -> processes.Identity:
    """Return the training process of the last rank on this machine.

    Raises:
        LaunchError: none is left.
    """
    ranks = processes.ranks(node_program(handle).pid)
    if not ranks:
        raise LaunchError("no training process is left")
    return ranks[max(ranks)]
