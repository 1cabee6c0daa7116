"""A process that waits on a node of an allocation, with everything imported, and runs one job after another there.

It is the command of a job whose ranks ``trainer.launch`` forks, started before there is a job: the allocation's program
starts it on each node, spare ones too, by ``hlatctl.node --warm``. Each job remains a step of its own, in which
``hlatctl.node`` connects to this process instead of starting the command. Standard library only.

The socket has an abstract name that only this user's programs know, and each end checks the other one's user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
import time
import uuid
from collections.abc import Sequence

from hlatctl.run import processes
from hlatctl.run.following import FORKS_ENV, MESSAGE_BYTES
from hlatctl.run.processes import node_name

#: Environment variables of an allocation's jobs: the secret in the name of the nodes' sockets, and that the nodes have
#: only just been asked to open them.
WARM_ENV, NEW_ENV = "HLATCTL_WARM", "HLATCTL_WARM_IS_NEW"
#: Set if a job's script shall start these processes on the nodes instead of the job.
STARTS_ENV = "HLATCTL_STARTS_WARM"
#: Time from the request to Slurm to the open socket.
_OPENS_S, _LOOK_S = 15.0, 0.05
#: struct ucred (unix(7)): process, user and group.
_CREDENTIALS = struct.Struct("3i")
#: Connections that may wait. Other users can connect, and are turned away, so room for one more is worth a wait.
_BACKLOG, _CONNECTS_S = 64, 5.0


def become(command: list[str], env: dict[str, str], keep: Sequence[int] = ()) -> None:
    """Open this node's socket, and become the command, which answers there. It ends with the scheduler's program.

    Args:
        command: the command of a job whose ranks ``trainer.launch`` forks.
        keep: further descriptors that stay open.

    Raises an OSError if the command can't be started.
    """
    processes.end_with_parent(os.getppid())
    processes.raise_open_files()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address())
    listener.listen(_BACKLOG)
    for descriptor in (listener.fileno(), *keep):
        os.set_inheritable(descriptor, True)
    own = {processes.JOB_ENV: uuid.uuid4().hex, FORKS_ENV: str(listener.fileno())}
    os.execvpe(command[0], command, {**env, **own})


def _address() -> str:
    """Return the abstract name of this node's socket. Nodes may share a network, as those of a test's cluster do."""
    secret = f"{os.environ[WARM_ENV]} {node_name()}"
    return f"\0hlatctl-{hashlib.sha256(secret.encode()).hexdigest()}"


def connect() -> tuple[socket.socket, processes.Identity, str] | None:
    """Return a connection to the process that waits on this node, its identity and its token; None: there is none."""
    if not os.environ.get(WARM_ENV):
        return None
    deadline_s = time.monotonic() + (_OPENS_S if os.environ.get(NEW_ENV) else 0.0)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):
            connection.settimeout(_CONNECTS_S)
            connection.connect(_address())
            connection.settimeout(None)
            pid = of_same_user(connection) or 0
            identity, token = processes.identify(pid), processes.job_of(pid)
            if identity and token:  # it has become the command
                return connection, identity, token
        connection.close()
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(_LOOK_S)


def of_same_user(connection: socket.socket) -> int | None:
    """Return the process at the other end of a connection; None if it belongs to another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid if user == os.geteuid() else None


def hand_over(connection: socket.socket, command: Sequence[str], env: dict[str, str]) -> None:
    """Send a job's command and variables, and this process's output streams.

    Raises an OSError if they can't be sent.
    """
    message = json.dumps({"command": command, "env": env}).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
    socket.send_fds(connection, [message], [1, 2])


def take(connection: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Receive a job's command and variables, and print to its output from now on.

    Raises an OSError or one of ``files.DAMAGED`` if the other end has gone, or sends something else.
    """
    message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    value = json.loads(message)
    for stream, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    return [str(word) for word in value["command"]], {str(name): str(text) for name, text in value["env"].items()}


def end_with(connection: socket.socket) -> None:
    """Have the kernel kill this process when the other end of a connection is closed, also by a death. Linux only.

    So a parent's death acts on a process too (``processes.end_with_parent``): it works while this process is stopped,
    or hangs. The other end must send nothing from now on.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        connection.recv(1, socket.MSG_DONTWAIT)  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)
