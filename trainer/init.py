"""The initial weights. They depend only on seed and name, so every layout starts from the same model."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from conf.schema import ModelConfig
from trainer.model import Llama, Parts, slice_dim


def build(config: ModelConfig, *, seq_len: int, seed: int) -> Llama:
    """Return a whole model with its initial weights, FP32, on the CPU."""
    model = Llama(config, seq_len)
    initialize(model, config, seed)
    return model


@torch.no_grad()
def initialize(model: Llama, config: ModelConfig, seed: int) -> None:
    """Fill this process's parameters or slices, and the rotary tables.

    Each parameter is drawn whole on the CPU, one at a time, and this process keeps its slice. So the processes don't
    communicate.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor  # which takes a second; preflight doesn't need it

    for name, parameter in model.named_parameters():
        value = initial_slice(name, list(parameter.shape), model.parts, config, seed)
        if isinstance(parameter, DTensor):  # sharded over the replicas
            value = value.to(device=parameter.device, dtype=parameter.dtype)
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(value)
    model.rotary.fill()


def initial_slice(name: str, shape: list[int], parts: Parts, config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value, FP32, of this process's slice of a parameter; ``shape`` is the slice's."""
    dim = slice_dim(name)
    if dim is None:
        return initial_value(name, shape, config, seed)
    spec = parts.heads.shard_spec(name) if parts.heads else None
    if spec is not None:
        return spec.shard_of(initial_value(name, spec.global_shape(shape), config, seed))
    whole = [size * (parts.slices if axis == dim else 1) for axis, size in enumerate(shape)]
    return initial_value(name, whole, config, seed).chunk(parts.slices, dim)[parts.rank]


def initial_value(name: str, shape: list[int], config: ModelConfig, seed: int) -> Tensor:
    """Return a parameter's initial value, FP32.

    Norms are 1. Other parameters are normal with standard deviation ``initializer_range``. With
    ``scaled_initialization`` it is divided by sqrt(2 l) for the two projections into the residual stream of layer l,
    counted from 1 (HLAT, arXiv 2404.10630, section 3.3).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    std = config.initializer_range
    if config.scaled_initialization and name.endswith(("attention.o.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
