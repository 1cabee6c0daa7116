"""The collectives of tensor-parallel layers, with their conjugates in the backward pass.

They are functional collectives, so they can be part of a compiled graph. Sources: Megatron-LM, arXiv 1909.08053; for
sequence parallelism, arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_SEQUENCE = 1


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """A tensor-parallel group.

    Args:
        rank: of this process in the group.
        sequence: between :meth:`leave` and :meth:`enter`, each process has a slice of the sequence, not all of it.
    """

    group: ProcessGroup
    rank: int
    size: int
    sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return all of (batch, seq, hidden) on every process; for the input of a column parallel layer."""
        exchange = _Gather if self.sequence else _Copy
        return exchange.apply(x, self.group.group_name, self.size)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' (batch, seq, hidden); for the output of a row parallel layer."""
        exchange = _Scatter if self.sequence else _Sum
        return exchange.apply(x, self.group.group_name, self.size)  # type: ignore[no-any-return,no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _sum(gradients[0], ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _gather(x, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradients[0], ctx.group, ctx.size), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _scatter(x, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradients[0], ctx.group, ctx.size), None, None


def _sum(x: Tensor, group: GroupName) -> Tensor:
    return _done(functional.all_reduce(x.contiguous(), "sum", group))


def _gather(x: Tensor, group: GroupName, size: int) -> Tensor:
    """Concatenate the slices of the sequence, on every process."""
    return torch.cat(gathered(x, group).chunk(size), dim=_SEQUENCE)


def _scatter(x: Tensor, group: GroupName, size: int) -> Tensor:
    """Sum over all processes; each gets its slice of the sequence."""
    return scattered(torch.cat(x.chunk(size, dim=_SEQUENCE)), group)


def gathered(x: Tensor, group: GroupName) -> Tensor:
    """Concatenate all processes' tensors along dimension 0, on every process. Autograd does not know this."""
    return _done(functional.all_gather_tensor(x.contiguous(), 0, group))


def scattered(x: Tensor, group: GroupName) -> Tensor:
    """Sum tensors over all processes; each gets its slice of dimension 0. Autograd does not know this."""
    return _done(functional.reduce_scatter_tensor(x, "sum", 0, group))


def _done(x: Tensor) -> Tensor:
    return functional.wait_tensor(x)  # type: ignore[no-any-return,no-untyped-call]
