"""The software and device that train, chosen by name. The loop never asks which one it has."""

from __future__ import annotations

from conf.schema import Config
from hlatctl.run.errors import DependencyError
from trainer.backends.base import Backend


def make_backend(config: Config) -> Backend:
    """The backend that ``backend.name`` asks for; its process group is up when this returns.

    Raises:
        DependencyError: this version can't train with it.
    """
    from trainer.backends.torch_native import TorchNative

    backends = {"torch_native": TorchNative}
    if config.backend.name not in backends:
        raise DependencyError(
            f"backend.name={config.backend.name}: can be planned and rehearsed, but not trained with yet",
            hint="train --dry-run rehearses it; backend=torch_native trains",
        )
    return backends[config.backend.name](config)
