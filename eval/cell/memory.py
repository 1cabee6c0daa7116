"""Measure the memory of all processes of a cell together: resident, swapped out, and in their sockets.

Needs a worker with its own process and network namespaces. Memory that can't be seen here is refused by
``eval.cell.seccomp`` (behind descriptors and keys, shared without a file) or bounded: files by the size of the cell's
folder, pipes by the kernel's limit per user (``pipe-user-pages-soft``, 64 MiB by default).
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
    """Measures one cell. Create it before the cell, because sockets that exist by then are not counted."""

    def __init__(self) -> None:
        self._sockets_before = _sockets()
        self._socket_bytes = _most_bytes_in_a_socket()

    def is_above(self, limit_bytes: int) -> bool:
        """Return whether the cell uses more memory than this.

        Memory that its processes share counts once. That is slow to read, so it is read only if the plain sum is above
        the limit. Every socket counts with the most that fits into it.
        """
        in_sockets = max(0, _sockets() - self._sockets_before) * self._socket_bytes
        sizes = {name: size for name in os.listdir("/proc") if name.isdecimal() and (size := _resident_bytes(name))}
        if sum(sizes.values()) + in_sockets <= limit_bytes:
            return False
        return sum(_proportional_bytes(name, size) for name, size in sizes.items()) + in_sockets > limit_bytes


def _resident_bytes(process: str) -> int:
    """Return the memory of a process of the cell, which has an id in a namespace below this one; 0 for all others."""
    text = _read(Path("/proc", process, "status"))
    return sum(int(size) << 10 for size in _SIZES.findall(text)) if _IDS.search(text) else 0


def _proportional_bytes(process: str, resident_bytes: int) -> int:
    """Return a process's memory; shared pages count in proportion to the number of processes that share them."""
    try:
        return sum(int(size) << 10 for size in _SHARES.findall(_read(Path("/proc", process, "smaps_rollup"))))
    except PermissionError:
        return resident_bytes  # a security module may refuse this; then all memory counts


def _sockets() -> int:
    """Return the number of sockets in this network, including closed ones that still hold data."""
    used = _SOCKETS.search(Path("/proc/net/sockstat").read_text(encoding="ascii"))
    return int(used[1]) if used else 0


def _most_bytes_in_a_socket() -> int:
    """Return how many bytes can wait in a socket with the default buffer size.

    The kernel accepts a message while fewer bytes than that wait, and a message can have the same size again.
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
        return ""  # the process has ended
