"""Ports for servers that start later. Linux assigns them to no connection and no server that accepts any port."""

from __future__ import annotations

import contextlib
import random
import socket

#: Below the usual ``net.ipv4.ip_local_port_range``, which begins at 32768.
_FIRST, _END = 10_000, 20_000


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine's loopback on which nothing listens now."""
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = random.SystemRandom().randrange(_FIRST, _END)
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # taken
                probe.bind(("127.0.0.1", port))
                found[port] = probe
    return list(found)


def free_port() -> int:
    return free_ports(1)[0]
