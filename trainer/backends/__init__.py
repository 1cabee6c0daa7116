"""The software and device that train, chosen by name. The loop never asks which one it has."""

from __future__ import annotations

from conf.schema import Config
from trainer.backends.base import Backend


def make_backend(config: Config) -> Backend:
    """The backend that ``backend.name`` asks for; its process groups are up when this returns.

    Raises:
        LaunchError: another user's process is among them.
    """
    from trainer.rendezvous import refuse_strangers

    backend = _make(config)
    refuse_strangers()
    return backend


def _make(config: Config) -> Backend:
    if config.backend.name == "nxd":
        from trainer.backends.nxd import Nxd

        return Nxd(config)
    from trainer.backends.torch_native import TorchNative

    return TorchNative(config)
