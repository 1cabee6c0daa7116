"""Launchers: how a job becomes processes. One protocol, text rendered apart from submission.

``base`` has the protocol and its plain data; ``local``, ``mock`` implement it. A new launcher is a module here,
an entry in ``launcher_for`` and in ``conf.validate.CHOICES``.
"""

from __future__ import annotations

from conf.schema import Config
from flows.launch.base import Launcher


def launcher_for(config: Config) -> Launcher:
    """The launcher that ``cluster.launcher`` names."""
    if config.cluster.launcher == "mock":
        from flows.launch.mock import MockLauncher

        return MockLauncher()
    from flows.launch.local import LocalLauncher

    return LocalLauncher()
