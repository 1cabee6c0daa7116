"""Who may connect to this process: processes of its own user, and nobody once its process groups exist.

The processes of a group trust each other's messages: ``torch.distributed.checkpoint`` unpickles them. gloo accepts
every connection to its ports, which every user of the machine can see, and keeps each one. It listens as long as the
group exists, and aborts when the process can open no more files. So a group's ports take no more connections once all
its processes are connected, and then each process checks the owner of the other end of every connection.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hlatctl.run.errors import LaunchError
from hlatctl.run.processes import name_of_user

#: Backends of ``torch.distributed`` that connect all processes when they create a group, and none later.
_CONNECTS_AT_ONCE = ("gloo",)
#: With this variable gloo connects two processes when they first need it (torch's ProcessGroupGloo.cpp).
LAZY_ENV = "TORCH_GLOO_LAZY_INIT"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"  # linux/tcp_states.h
_DESCRIPTORS = Path("/proc/self/fd")
_STDERR = 2
_POLL_S = 0.05
#: The prefix of an IPv4 address on an IPv6 socket.
_IPV4_IN_IPV6 = "0000000000000000FFFF0000"
#: asm-generic/socket.h; a filter that drops every packet: BPF_RET with length 0 (linux/filter.h).
_SO_ATTACH_FILTER, _DROP_ALL = 26, struct.pack("=HBBI", 0x06, 0, 0, 0)


class _Store(Protocol):
    def set(self, key: str, value: str, /) -> object: ...

    def wait(self, keys: list[str], /) -> object: ...


def meet(store: _Store, rank: int, world_size: int) -> None:
    """Wait until all processes of a group have started, so that no process listens while it waits for a slow one."""
    store.set(f"here-{rank}", "")
    store.wait([f"here-{other}" for other in range(world_size)])


@contextmanager
def connecting(backend: str) -> Iterator[None]:
    """Create process groups of a backend in this block; afterwards no other process can connect to their ports. Linux.

    NCCL's ports stay open: it connects two processes when they first exchange something.

    Raises:
        LaunchError: another user's process is connected.
    """
    if sys.platform != "linux":
        yield
        return
    before = frozenset(_own_sockets())
    yield
    if backend in _CONNECTS_AT_ONCE and os.environ.get(LAZY_ENV, "0") == "0":
        for inode, descriptor in _own_sockets().items():
            if inode not in before:
                _take_no_more(descriptor)
    refuse_strangers(before)


def refuse_strangers(known: Collection[str] = (), *, timeout_s: float = 120.0) -> None:
    """Check that this process is connected only to processes of its own user. Linux, on one machine.

    Args:
        known: inodes of sockets that are not checked.
        timeout_s: how long to wait until the other ends accept their connections.

    Raises:
        LaunchError: another user's process is connected.
        ConnectionError: the other end of a connection is closed, or on another machine.
    """
    if sys.platform != "linux" or not on_one_machine():
        return
    deadline = time.monotonic() + timeout_s
    while not _all_accepted(known):
        if time.monotonic() > deadline:
            raise ConnectionError("the other end of a connection is closed, or on another machine")
        time.sleep(_POLL_S)


def on_one_machine() -> bool:
    """Return whether all processes of this job are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _take_no_more(descriptor: int) -> None:
    """Have the kernel drop new connections of a listening TCP socket; accepted connections stay.

    gloo aborts if its socket is shut down. Closing the socket would let gloo close a reused descriptor later.
    """
    code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("@HP", 1, ctypes.addressof(code))  # struct sock_fprog
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:  # it may be closed by now
        is_tcp = own.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _all_accepted(known: Collection[str]) -> bool:
    """Return whether the other end of each connection has an owner, which it gets when it is accepted.

    The kernel returns its table in parts, so rows may be missing.

    Raises:
        LaunchError: the owner is another user.
    """
    rows, own = list(_sockets()), set(_own_sockets()).difference(known)
    users = {(row.local, row.remote): row.user for row in rows if row.inode != "0"}
    ends = [(row.remote, row.local) for row in rows if row.inode in own and row.state != _LISTENS]
    for user in (users[end] for end in ends if end in users):
        if user != os.geteuid():
            raise LaunchError(
                f"rank {os.environ.get('RANK', '0')}: a process of user {name_of_user(user)} is connected instead of "
                "another rank; only processes of the run's user may connect",
                hint="find the process with `ss -tp` as root, end it, and resume the run",
            )
    return all(end in users for end in ends)


@dataclass(frozen=True)
class _Socket:
    """A row of the kernel's table of sockets, with addresses and ports in hexadecimal (proc_net_tcp)."""

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


def _own_sockets() -> dict[str, int]:
    """Return a descriptor of each of this process's sockets by inode, except its standard streams."""
    found = {}
    for descriptor in (int(entry.name) for entry in _DESCRIPTORS.iterdir()):
        with suppress(OSError):  # the descriptor that lists this folder
            target = os.readlink(_DESCRIPTORS / str(descriptor))
            if descriptor > _STDERR and target.startswith("socket:["):
                found[target.removeprefix("socket:[").removesuffix("]")] = descriptor
    return found
