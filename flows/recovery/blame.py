"""Decide which hosts the end of an attempt is held against. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flows.launch.base import Status
from flows.recovery.failure_causes import NODE_CAUSES, Cause


def blamed_hosts(cause: Cause, status: Status, used: Sequence[str], failed_host: str) -> tuple[str, ...]:
    """Return the hosts to blame; none if the cause is no node's fault, or if nothing tells them apart.

    Args:
        cause: of the end.
        status: of the ended job; its hosts and blamed hosts count if the launcher tells them.
        used: the hosts of the attempt if the launcher doesn't tell them.
        failed_host: the one that torchrun names, or empty.
    """
    hosts = status.hosts or tuple(used)
    if cause not in NODE_CAUSES:
        return ()
    if cause == "node_failed":
        return status.blamed_hosts
    if len(hosts) == 1:
        return hosts
    # A job that hangs is ended from outside: the order in which its nodes end says nothing.
    if status.hosts and cause != "hang":
        return status.blamed_hosts if len(status.blamed_hosts) < len(hosts) else ()
    return tuple(host for host in hosts if host == failed_host)[:1]
