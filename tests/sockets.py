"""What processes listen on, from the kernel's tables. Linux only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: 127.0.0.1 and ::1 as the kernel writes them (proc_net_tcp).
IPV4_LOOPBACK = "0100007F"
LOOPBACK = frozenset({IPV4_LOOPBACK, "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"})
#: TCP_LISTEN; the only state of UDP.
_LISTENS = ("0A", "07")


def hosts(sockets: Iterable[str]) -> set[str]:
    """Their addresses without ports."""
    return {socket.split(":")[0] for socket in sockets}


def listening(pids: Iterable[int]) -> list[str]:
    """The sockets on which processes listen, ``ADDRESS:PORT`` in hexadecimal as the kernel writes them."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # it has been closed
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return [row[1] for row in rows if row[9] in inodes and row[3] in _LISTENS]
