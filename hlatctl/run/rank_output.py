"""The output of one rank, which ``hlatctl.node`` writes into the log of its node. Standard library only.

A rank gives the node's program the reading end of a pipe and prints into the other end. So the lines of a rank stay in
order, carry its number, and never mix with those of another rank, and one file serves all ranks of a node.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

#: Names the socket of the node's program, in a private folder.
SOCKET_ENV = "HLATCTL_LOG_SOCKET"
#: Limit of a rank's wait for the node's program, which answers immediately, even to all of its ranks.
_ANSWER_S = 30.0


def node_log(log: Path, node: int) -> Path:
    """Return the log of a node: the first node's lines are in the job's own log, ``train.log``."""
    return log.with_name(f"{log.stem}.node-{node}.log") if node else log


def append_to(log: Path) -> None:
    """Append the output of this process to a log from now on."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def prefix(rank: int) -> bytes:
    """Return the beginning of each line of a rank in the log of its node. PyTorch writes ranks in the same way."""
    return f"[rank{rank}]: ".encode()


def send_to_node_log() -> None:
    """Send the output of this process and its children to the log of its node, marked with its rank.

    Without torchrun, or if the node's program does not answer, the output stays torchrun's.
    """
    place, rank = os.environ.get(SOCKET_ENV), os.environ.get("RANK", "")
    if not place or not rank.isdigit():
        return
    read, write = os.pipe()
    with suppress(OSError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(place)
            socket.send_fds(connection, [rank.encode()], [read])
            taken = connection.recv(1)
        if taken:
            os.dup2(write, 1)
            os.dup2(write, 2)
    os.close(read)
    os.close(write)
