"""Rotary position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig


class Rotary(nn.Module):
    """The tables of the rotary embedding. Each layer reads them here, so pipeline stages don't exchange them."""

    def __init__(self, seq_len: int, model: ModelConfig) -> None:
        super().__init__()
        self._shape = seq_len, model
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (seq, head_dim)."""
        return self.get_buffer("cos"), self.get_buffer("sin")

    def fill(self) -> None:
        """Write the tables after a model on the meta device has got memory."""
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.get_buffer(name).copy_(table)


def rotary_tables(seq_len: int, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (seq, head_dim), both halves equal (RoFormer, arXiv 2104.09864)."""
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies(model))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def frequencies(model: ModelConfig) -> Tensor:
    """Return the rotations' frequencies in radians per token, FP32 (head_dim / 2), from high to low."""
    plain = 1.0 / model.rope_theta ** (torch.arange(0, model.head_width, 2, dtype=torch.float32) / model.head_width)
    return scaled_like_llama3(plain, model) if model.rope_scaling == "llama3" else plain


def scaled_like_llama3(plain: Tensor, model: ModelConfig) -> Tensor:
    """Return the frequencies for longer sequences, as Llama 3.1's reference code (``apply_scaling``) computes them.

    High frequencies stay, low ones are divided by ``rope_scaling_factor``, and those between are interpolated by their
    number of turns in ``rope_original_seq_len`` tokens.
    """
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    turns = model.rope_original_seq_len / (2 * math.pi / plain)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / model.rope_scaling_factor + kept * plain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, seq, head_dim), in FP32.

    A compiler writes tensors to memory before it joins them, forward or backward. So each half is converted alone.
    """
    (cos1, cos2), (sin1, sin2) = (table[: x.shape[-2]].chunk(2, dim=-1) for table in (cos, sin))
    first, second = (half.float() for half in x.chunk(2, dim=-1))
    rotated = first * cos1 - second * sin1, second * cos2 + first * sin2
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)
