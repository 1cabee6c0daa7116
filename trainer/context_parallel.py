"""Context parallelism: the processes of a group have parts of each sequence.

Each sequence is cut into twice as many chunks as there are processes. A process has one chunk from the front and the
mirrored one from the back, so all do the same work although attention is causal. Before attention, keys and values of
the whole sequence are gathered (Llama 3, arXiv 2407.21783, section 3.3.2); everything else needs a process's own tokens
only. The weights are replicated, as over data-parallel processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.collectives import gathered, scattered

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

#: Dimension of (keys and values, batch, head, seq, head_dim) that is divided.
_SEQUENCE = 3


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """A context-parallel group.

    Args:
        rank: of this process in the group.
    """

    group: ProcessGroup
    rank: int
    size: int

    def own(self, x: Tensor) -> Tensor:
        """Return this process's chunks (batch, seq / size) of (batch, seq)."""
        chunks = x.chunk(2 * self.size, dim=1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=1)

    def positions(self, seq_len: int, device: torch.device) -> Tensor:
        """Return the positions of this process's tokens in the sequence (seq / size)."""
        return self.own(torch.arange(seq_len, device=device)[None])[0]

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return all processes' keys and values (batch, head, seq, head_dim), in the sequence's order."""
        both = _Gather.apply(torch.stack((k, v)), self.group.group_name, self.size)  # type: ignore[no-untyped-call]
        return both[0], both[1]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        halves = [part.chunk(2, dim=_SEQUENCE) for part in gathered(both, group).chunk(size)]
        return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], dim=_SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        chunks = gradients[0].chunk(2 * ctx.size, dim=_SEQUENCE)
        parts = [torch.cat((chunks[rank], chunks[-1 - rank]), dim=_SEQUENCE) for rank in range(ctx.size)]
        return scattered(torch.cat(parts), ctx.group), None, None
