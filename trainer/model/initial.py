"""The initial weights: normal numbers that depend only on seed, parameter and place, so each process draws its own.

Element (row, column) of a parameter is a function of a key, which is a hash of (seed, name), and of the two numbers. So
every layout and every number of processes starts with the same bits, and a process draws no other's elements. A mixer
of 64 bits turns a counter into two random words (SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014). A word becomes a normal number by a table of the inverse distribution function. All
operations are on integers, or single multiplications and additions in FP32. So the bits don't depend on the processor's
vector length, or on how many elements are drawn together, as those of logarithms and cosines may.
"""

from __future__ import annotations

import functools
import hashlib
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from conf.parametrization import initial_std
from conf.schema import ModelConfig
from trainer.model.decoder import Llama, Parts, slice_dim

#: Constants of SplitMix64 as signed integers; the first one separates counters.
GAMMA, _MIX1, _MIX2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: A word's 31 lower bits, plus 1, are a probability of the tail. The table has 2**6 segments per power of two of it, in
#: which the inverse is linear: its error is below 1e-4 standard deviations. The largest number is 6.3 of them.
_SEGMENT_BITS, _TAIL_BITS, _FP32_FRACTION_BITS, _FP32_BIAS = 6, 31, 23, 127
#: Elements per thread that are drawn together; the intermediate results fit into a core's cache.
_BLOCK_ENTRIES = 1 << 16


def build(config: ModelConfig, *, seq_len: int, seed: int) -> Llama:
    """Return a whole model with its initial weights, FP32, on the CPU."""
    model = Llama(config, seq_len)
    initialize(model, config, seed)
    return model


@torch.no_grad()
def initialize(model: Llama, config: ModelConfig, seed: int) -> None:
    """Fill this process's part of the model, without communication."""
    parameter: Any
    for name, parameter in model.named_parameters():
        part, first_row = parameter.detach(), 0
        if hasattr(parameter, "placements"):  # a DTensor, sharded over the replicas; importing the class takes a second
            sharded: Any = parameter
            part = sharded.to_local()
            if not part.numel():
                continue
            first_row = _first_row(sharded)
        fill_slice(part, name, list(parameter.shape), model.parts, config, seed, first_row=first_row)


def _first_row(sharded: Any) -> int:
    """Return the first row of this process's shard of a DTensor that FSDP divided by rows.

    PyTorch's own function for it reads a tensor, which needs one with values.
    """
    ((dim, _),) = [(dim, place) for dim, place in enumerate(sharded.placements) if place.is_shard(0)]
    rows, mesh = sharded.shape[0], sharded.device_mesh
    return int(min(rows, mesh.get_local_rank(dim) * -(-rows // mesh.size(dim))))


def initial_slice(name: str, shape: list[int], parts: Parts, config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value, FP32, of this process's slice of a parameter; ``shape`` is the slice's."""
    value = torch.empty(shape)
    fill_slice(value, name, shape, parts, config, seed)
    return value


def fill_slice(
    part: Tensor, name: str, shape: list[int], parts: Parts, config: ModelConfig, seed: int, *, first_row: int = 0
) -> None:
    """Set some rows of this process's slice of a parameter to their initial values.

    Norms are 1. Other parameters are normal with standard deviation ``initializer_range``. With
    ``scaled_initialization`` it is divided by sqrt(2 l) for the two projections into the residual stream of layer l,
    counted from 1 (HLAT, arXiv 2404.10630, section 3.3). With ``mup_base_width`` it also follows the width
    (:func:`conf.parametrization.initial_std`).

    Args:
        part: the rows, of any dtype, on any device.
        shape: shape of the slice.
        first_row: the part's first row in the slice.
    """
    if name.endswith("norm.weight"):
        part.fill_(1.0)
        return
    std = initial_std(name, config)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big", signed=True)
    rows, columns, width = _place(name, shape, parts)
    rows = rows[first_row : first_row + part.shape[0]]
    count = max(1, _BLOCK_ENTRIES * torch.get_num_threads() // max(1, len(columns)))
    for target, numbers in zip(torch.split(part, count), torch.split(rows, count), strict=True):
        target.copy_(normal_block(key, numbers, columns, width).mul_(std))


def _place(name: str, shape: list[int], parts: Parts) -> tuple[Tensor, range, int]:
    """Return where a slice is in the whole parameter: its rows' numbers, its columns, and the number of all columns."""
    dim = slice_dim(name)
    rows, columns, width = torch.arange(shape[0]), range(shape[1]), shape[1]
    if dim is None:
        return rows, columns, width
    spec = parts.heads.shard_spec(name) if parts.heads else None
    ranges = [range(parts.rank * shape[dim], (parts.rank + 1) * shape[dim])]
    if spec is not None:
        ranges = [range(part.start, part.stop) for part in spec.ranges]
    if dim == 0:
        return torch.cat([torch.arange(part.start, part.stop) for part in ranges]), columns, width
    (columns,) = ranges
    return rows, columns, spec.global_size if spec else width * parts.slices


def normal_block(key: int, rows: Tensor, columns: range, width: int) -> Tensor:
    """Return standard normal numbers, FP32, of the elements in some rows and consecutive columns of a matrix.

    Args:
        key: distinguishes matrices, a signed integer of 64 bits.
        rows: numbers of the rows, int64.
        columns: numbers of the columns.
        width: number of all columns; each row begins with a new counter.
    """
    first, stop = columns.start // 2, -(-columns.stop // 2)  # a counter gives two elements
    counters = (rows * -(-width // 2)).mul_(GAMMA).add_(key)[:, None] + torch.arange(first, stop).mul_(GAMMA)
    words = mixed(counters).view(torch.int32)
    words = words[:, columns.start - 2 * first :][:, : len(columns)]
    tail = words.bitwise_and((1 << _TAIL_BITS) - 1).float().add_(1.0)
    exponent_and_segment = tail.view(torch.int32) >> (_FP32_FRACTION_BITS - _SEGMENT_BITS)
    segment = exponent_and_segment.sub_(_FP32_BIAS << _SEGMENT_BITS).flatten()
    starts, slopes = _inverse()
    # Two operations: one that multiplies and adds may round once or twice, depending on the processor.
    sizes = tail.flatten().mul_(slopes.index_select(0, segment)).add_(starts.index_select(0, segment))
    signs = words.bitwise_and(-(1 << _TAIL_BITS)).flatten()
    return sizes.view(torch.int32).bitwise_xor_(signs).view(torch.float32).view(len(rows), len(columns))


def mixed(z: Tensor) -> Tensor:
    """Mix the bits of 64-bit integers, in place; a mask makes an arithmetic shift a logical one."""
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


@functools.cache
def _inverse() -> tuple[Tensor, Tensor]:
    """Return the lines, by segment, from a tail's probability in units of 2**-32 to a number of that probability."""
    per_power = 1 << _SEGMENT_BITS
    ends = [2.0 ** (n // per_power) * (1 + n % per_power / per_power) for n in range(_TAIL_BITS * per_power + 2)]
    # A tail of n stands for probabilities between n - 1 and n; from one half on, numbers are 0.
    normal, whole = NormalDist(), 2.0 ** (_TAIL_BITS + 1)
    heights = [-normal.inv_cdf(min(0.5, (end - 0.5) / whole)) for end in ends]
    slopes = [
        (height1 - height0) / (end1 - end0)
        for height0, height1, end0, end1 in zip(heights, heights[1:], ends, ends[1:], strict=False)
    ]
    starts = [height - slope * end for height, slope, end in zip(heights, slopes, ends, strict=False)]
    return torch.tensor(starts), torch.tensor(slopes)
