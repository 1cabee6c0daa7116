"""Root-mean-square norms, whole and sliced, computed in FP32 and returned in the precision of their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from trainer.collectives import TensorParallel


class RMSNorm(nn.RMSNorm):
    """A norm over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class SlicedRMSNorm(nn.Module):
    """A norm over a last dimension of which each tensor-parallel process has a slice.

    Args:
        width: of the slice.
        eps: added to the mean square of all slices.
        tp: the processes, which exchange one number per token.
    """

    def __init__(self, width: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._width, self._eps, self._tp = width * tp.size, eps, tp

    def forward(self, x: Tensor) -> Tensor:
        """(..., width of the slice) to the same shape."""
        exact = x.float()
        mean_square = self._tp.total(exact.square().sum(-1, keepdim=True)) / self._width
        return (exact * torch.rsqrt(mean_square + self._eps) * self.weight.float()).to(x.dtype)


class QueryKeyNorms(nn.Module):
    """The norms of queries and keys before their rotation; none if ``model.qk_norm`` is ``none``.

    The weights of ``head`` norms are shared by all heads, those of ``all`` norms are sharded like the heads
    (:func:`trainer.model.slice_dim` tells them apart by name).

    Args:
        config: the shape.
        slices: number of tensor-parallel processes.
        tp: these processes; None if there is only one slice.
    """

    def __init__(self, config: ModelConfig, slices: int, tp: TensorParallel | None) -> None:
        super().__init__()
        self._of_heads, self._of_all = config.qk_norm == "head", config.qk_norm == "all"
        eps = config.rms_norm_eps
        if self._of_heads:
            self.q_head_norm, self.k_head_norm = (RMSNorm(config.head_width, eps=eps) for _ in range(2))
        if self._of_all:
            widths = (config.query_width // slices, config.kv_width // slices)
            self.q_norm, self.k_norm = (
                RMSNorm(width, eps=eps) if tp is None else SlicedRMSNorm(width, eps, tp) for width in widths
            )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (batch, seq, head, head_dim) to the same shapes."""
        if self._of_heads:
            return self.q_head_norm(q), self.k_head_norm(k)
        if self._of_all:
            return self.q_norm(q.flatten(2)).view(q.shape), self.k_norm(k.flatten(2)).view(k.shape)
        return q, k
