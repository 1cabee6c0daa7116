"""The name of this node, as the cluster knows it."""

from __future__ import annotations

import os
import platform

NODE_NAME_ENV = "HLATCTL_NODE_NAME"


def node_name() -> str:
    """Return the scheduler's name of this node, or else the machine's own."""
    return os.environ.get(NODE_NAME_ENV) or platform.node()
