"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """The tables of the rotary embedding. Each layer reads them here, so pipeline stages don't exchange them."""

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self._shape = seq_len, head_dim, theta
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (seq, head_dim)."""
        return self.get_buffer("cos"), self.get_buffer("sin")

    def fill(self) -> None:
        """Write the tables after a model on the meta device has got memory."""
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.get_buffer(name).copy_(table)


def rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (seq, head_dim), both halves equal (RoFormer, arXiv 2104.09864)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, seq, head_dim), in FP32."""
    seq = x.shape[-2]
    exact = x.float()
    first, second = exact.chunk(2, dim=-1)
    return (exact * cos[:seq] + torch.cat((-second, first), dim=-1) * sin[:seq]).to(x.dtype)
