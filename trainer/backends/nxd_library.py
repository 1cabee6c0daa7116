"""The import of NeuronX Distributed, with its environment variables and its default process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conf.environment import CASTING
from conf.schema import Config
from hlatctl.run.errors import ConfigError, DependencyError
from trainer import rendezvous
from trainer.model.precision import PRECISIONS


def set_environment(config: Config) -> None:
    """Set the environment variables that torch-xla and the runtime read on import.

    Tensors keep their number formats: the switches that changed them are deprecated (Neuron SDK, "Migration from
    XLA_USE_BF16/XLA_DOWNCAST_BF16").

    Raises:
        ConfigError: a variable has another value already.
    """
    wanted = {
        "PJRT_DEVICE": {"neuron": "NEURON"}.get(config.backend.device, "CPU"),
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(PRECISIONS[config.precision.name].stochastic_rounding)),
        **dict.fromkeys(CASTING, "0"),
    }
    for name, value in wanted.items():
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(
                f"{name}={os.environ[name]} in the environment: backend.device={config.backend.device} and "
                f"precision.name={config.precision.name} need {name}={value}",
                hint=f"unset {name}",
            )


def import_library() -> tuple[Any, Any]:
    """Return the modules neuronx_distributed and torch_xla.

    Raises:
        DependencyError: one of them is not installed, or can't be imported.
    """
    try:
        import neuronx_distributed
        import torch_xla
        import torch_xla.distributed.xla_backend
    except ImportError as error:
        name = error.name or str(error)
        if name.startswith("transformers."):
            raise DependencyError(
                f"backend.name=nxd: neuronx-distributed imports {name}, which the installed transformers lacks",
                hint="pip install 'transformers>=4.57,<5'",
            ) from None
        raise DependencyError(
            f"backend.name=nxd: {name} is not installed",
            hint="use an environment with the Neuron SDK's torch-neuronx and neuronx-distributed; see docs/neuron.md",
        ) from None
    return neuronx_distributed, torch_xla


def join(world_size: int, *, timeout: timedelta) -> None:
    """Create the default process group of torchrun's processes, or of this single process."""
    if world_size > 1:
        rendezvous.join("xla", timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # public, but not in its module's list
        dist.init_process_group("xla", store=store, rank=0, world_size=1)
