"""The name of this node, as the cluster knows it, and the names of many as text."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

NODE_NAME_ENV = "HLATCTL_NODE_NAME"
#: Hosts that a text names.
_NAMED = 8


def node_name() -> str:
    """Return the scheduler's name of this node, or else the machine's own."""
    return os.environ.get(NODE_NAME_ENV) or platform.node()


def host_names(hosts: Sequence[str]) -> str:
    """Return the names of hosts as text, of many only the first ones."""
    if len(hosts) <= _NAMED:
        return ", ".join(hosts) or "unknown nodes"
    return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED:,} more"
