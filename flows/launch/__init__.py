"""Launchers: how a job becomes processes. One protocol, text rendered apart from submission.

``base`` has the protocol and its plain data; ``local``, ``mock`` implement it. A new launcher is a module here,
an entry in ``launcher_for`` and in ``conf.validate.CHOICES``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.schema import Config
from flows.launch.base import Launcher

if TYPE_CHECKING:
    from flows.rehearsal.world import World


def launcher_for(config: Config, world: World | None = None) -> Launcher:
    """The launcher that ``cluster.launcher`` names.

    Args:
        config: of a run.
        world: that the mock plays in.
    """
    if config.cluster.launcher == "mock":
        from flows.launch.mock import MockLauncher

        return MockLauncher(config, world)
    from flows.launch.local import LocalLauncher

    return LocalLauncher()
