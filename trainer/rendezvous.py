"""How the processes of a job meet, so that nobody else is among them.

What they exchange is trusted: ``torch.distributed.checkpoint`` unpickles it. gloo takes whoever connects first for the
peer that it waits for, and every user of the machine can see its ports. So on one machine the processes meet in a
private folder, and once they are connected each checks who is at the other end.
"""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hlatctl.run.errors import LaunchError
from hlatctl.run.scratch import JOB_FOLDER_ENV

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"  # linux/tcp_states.h
_DESCRIPTORS = Path("/proc/self/fd")
_STDERR = 2
_POLL_S = 0.05
#: How an IPv4 address begins that a socket for both families has.
_IPV4_IN_IPV6 = "0000000000000000FFFF0000"


def join(backend: str, *, timeout: timedelta) -> None:
    """Form the default process group of the processes that torchrun started.

    Args:
        backend: PyTorch's name of what it talks through.
        timeout: a peer that is silent this long is gone.
    """
    folder = os.environ.get(JOB_FOLDER_ENV)
    if folder is None or not _on_one_machine():
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = os.path.join(folder, f"ranks-{start}")
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined] # public, but not in its module's list
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def refuse_strangers(*, timeout_s: float = 120.0) -> None:
    """Make sure that this process is connected to processes of its own user alone. Linux, on one machine.

    Args:
        timeout_s: for the other ends to accept their connections, which a busy machine delays.

    Raises:
        LaunchError: to another user's process.
        ConnectionError: nobody is at the other end, or it is on another machine.
    """
    if sys.platform != "linux" or not _on_one_machine():
        return
    deadline = time.monotonic() + timeout_s
    while not _all_known():
        if time.monotonic() > deadline:
            raise ConnectionError("the other end of a connection is closed, or on another machine")
        time.sleep(_POLL_S)


def _all_known() -> bool:
    """Whether the other end of each connection has an owner: it has none before it is accepted. Refuses strangers.

    The kernel shows its table in pieces, and may leave out a row that is there.
    """
    sockets, own = list(_sockets()), _own_inodes()
    users = {(socket.local, socket.remote): socket.user for socket in sockets if socket.inode != "0"}
    ends = [(socket.remote, socket.local) for socket in sockets if socket.inode in own and socket.state != _LISTENS]
    for user in (users[end] for end in ends if end in users):
        if user != os.geteuid():
            raise LaunchError(
                f"rank {os.environ.get('RANK', '0')}: a process of user {_name(user)} is connected to it in place of "
                "another rank; only the run's own user may be",
                hint="`ss -tp` as root shows the process; end it and resume the run",
            )
    return all(end in users for end in ends)


@dataclass(frozen=True)
class _Socket:
    """A row of the kernel's table; addresses and ports are hexadecimal, as it has them (proc_net_tcp)."""

    local: str
    remote: str
    state: str
    user: int
    inode: str


def _sockets() -> Iterator[_Socket]:
    for table in _TABLES:
        with suppress(OSError):  # no IPv6
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                local, remote = (address.removeprefix(_IPV4_IN_IPV6) for address in fields[1:3])
                yield _Socket(local, remote, fields[3], int(fields[7]), fields[9])


def _own_inodes() -> set[str]:
    """Of this process's sockets, but for what it may have been given as its standard streams."""
    found = set()
    for entry in (entry for entry in _DESCRIPTORS.iterdir() if int(entry.name) > _STDERR):
        with suppress(OSError):  # the one that reads this folder
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
