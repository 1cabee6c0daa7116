"""What all processes of a cell hold together: memory, what was swapped out of it, and what lies in their sockets.

Works in a worker that has its own view of processes and its own network. Some memory can't be seen from here.
``eval.cell.seccomp`` refuses it to programs: memory behind descriptors and keys, shared memory without a file.
The rest is bounded: files by the size of the cell's folder, pipes by the kernel's limit for each user
(``pipe-user-pages-soft``, 64 MiB by default).
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_SIZES = re.compile(r"^(?:VmRSS|VmSwap):\s+(\d+) kB", re.MULTILINE)
_SHARES = re.compile(r"^(?:Pss|SwapPss):\s+(\d+) kB", re.MULTILINE)
_IDS = re.compile(r"^NSpid:\s+\d+\s+\d", re.MULTILINE)
_SOCKETS = re.compile(r"^sockets: used (\d+)$", re.MULTILINE)


class Meter:
    """Measures one cell. Made before it is: sockets that exist by then aren't its own."""

    def __init__(self) -> None:
        self._sockets_before = _sockets()
        self._socket_bytes = _most_bytes_in_a_socket()

    def is_above(self, limit_bytes: int) -> bool:
        """Whether the cell holds more than this.

        Memory that its processes share counts once. That is slow to find, so it is only asked where the simple sum is
        above. Every socket counts with the most that can lie in it.
        """
        in_sockets = max(0, _sockets() - self._sockets_before) * self._socket_bytes
        held = {name: size for name in os.listdir("/proc") if name.isdecimal() and (size := _bytes_held(name))}
        if sum(held.values()) + in_sockets <= limit_bytes:
            return False
        return sum(_bytes_of_its_own(name, size) for name, size in held.items()) + in_sockets > limit_bytes


def _bytes_held(process: str) -> int:
    """The memory of a process of the cell: one that also has an id in a namespace below this one; 0 for all others."""
    text = _read(Path("/proc", process, "status"))
    return sum(int(size) << 10 for size in _SIZES.findall(text)) if _IDS.search(text) else 0


def _bytes_of_its_own(process: str, held_bytes: int) -> int:
    """A process's memory, with what it shares divided by how many share it."""
    try:
        return sum(int(size) << 10 for size in _SHARES.findall(_read(Path("/proc", process, "smaps_rollup"))))
    except PermissionError:
        return held_bytes  # a security module may keep it to itself; then all of it counts


def _sockets() -> int:
    """Sockets in this network, those that are closed but still hold data included."""
    found = _SOCKETS.search(Path("/proc/net/sockstat").read_text(encoding="ascii"))
    return int(found[1]) if found else 0


def _most_bytes_in_a_socket() -> int:
    """What can wait to be read from a socket whose buffer has the size that a new one has.

    The kernel lets a message begin while less than that waits, and a message can be as large again.
    """
    pair = socket.socketpair()
    try:
        return 2 * pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    finally:
        for each in pair:
            each.close()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended since
