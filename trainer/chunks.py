"""Which blocks of each whole tensor this process has, and which of them it writes to checkpoints.

Each process decides alone, from its own place among the processes, so a save needs no plan that processes agree on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.shared_heads import UnevenShard


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a whole tensor.

    Args:
        values: what this process has of it, as a plain tensor. Writing to it changes the process's tensor.
        offsets: of its first element in the whole, one per dimension.
        shape: of the whole tensor.
    """

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def chunks_of(tensor: Any) -> list[Chunk]:
    """Return the blocks that this process has, without empty ones."""
    if isinstance(tensor, UnevenShard):
        return [chunk for chunk, _ in _uneven(tensor)]
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return [Chunk(values=tensor.detach(), offsets=(0,) * len(shape), shape=shape)]
    values = tensor.to_local().detach()  # a DTensor; importing the class takes a second
    if not values.numel():
        return []
    (place,) = tensor.__create_chunk_list__()
    return [Chunk(values=values, offsets=tuple(place.offsets), shape=shape)]


def chunks_to_write(tensors: Mapping[str, Tensor]) -> dict[str, Chunk]:
    """Return the block of each tensor that this process writes. Processes with equal blocks share the work.

    All processes that have a block also have the same other blocks of that kind. So each of them deals the blocks to
    all of them, largest first, each to the one with the least bytes, with the same result.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    mine = {}
    for name in sorted(tensors, key=lambda name: (-_nbytes(tensors[name]), name)):
        axes, replica, replicas = _replicas(tensors[name])
        load = loads.setdefault(axes, [0] * replicas)
        writer = load.index(min(load))
        load[writer] += _nbytes(tensors[name])
        if writer == replica:
            mine[name] = tensors[name]
    written = {name: _written(tensor) for name, tensor in mine.items()}
    return {name: chunk for name, chunk in sorted(written.items()) if chunk is not None}


def _written(tensor: Tensor) -> Chunk | None:
    """Return the only block of a tensor that this process may write."""
    if isinstance(tensor, UnevenShard):
        return next((chunk for chunk, writes in _uneven(tensor) if writes), None)
    return next(iter(chunks_of(tensor)), None)


def _uneven(tensor: UnevenShard) -> list[tuple[Chunk, bool]]:
    shape = tuple(tensor.size())
    return [
        (Chunk(values=values, offsets=offsets, shape=shape), writes)
        for values, offsets, writes in tensor.chunks
        if values.numel()
    ]


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of this process's part."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(part.numel()) * part.element_size()


def _replicas(tensor: Tensor) -> tuple[tuple[str, ...], int, int]:
    """Return along which axes the process's part is replicated, its number among the replicas, and how many exist."""
    if isinstance(tensor, UnevenShard):
        return ("uneven",), *tensor.replica
    axes: list[str] = []
    replica, replicas = 0, 1
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_replicate():
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            axes.append(str(axis))
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
            replicas *= mesh.size(axis)
    return tuple(axes), replica, replicas
