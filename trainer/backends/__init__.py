"""The backends: the software and device that train, chosen by name."""

from __future__ import annotations

from conf.schema import Config
from trainer.backends.base import Backend


def make_backend(config: Config) -> Backend:
    """Return the backend that ``backend.name`` selects, with its process groups.

    Raises a LaunchError if another user's process is connected.
    """
    if config.backend.name == "nxd":
        from trainer.backends.nxd import Nxd

        return Nxd(config)
    from trainer.backends.torch_native import TorchNative

    return TorchNative(config)
