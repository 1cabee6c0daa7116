"""Next-token cross-entropy fused with the output projection, one block of rows at a time.

The logits of a whole batch (rows x vocabulary, FP32) are never in memory. A block's logits are computed, turned into
their gradient in place and used while they are in the cache. The three products are those of a linear layer's forward
and backward, so nothing is computed twice. If the projection is sharded by vocabulary, each process computes the logits
of its own entries, and two numbers per row are exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from conf.devices import DEVICES


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        cast = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        rows = DEVICES[hidden.device.type].loss_rows(weight.shape[0])
        # A sum of blocks in BF16 would lose those that are below 1/256 of it.
        sum_dtype = torch.float32 if hidden.shape[0] > rows else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype)
        for start in range(0, hidden.shape[0], rows):
            block = slice(start, start + rows)
            loss, gradient = _block(hidden[block] @ cast.T, targets[block, None], z_loss, group)
            total += loss
            gradient = gradient.to(hidden.dtype)
            torch.mm(gradient, cast, out=grad_hidden[block])
            if sum_dtype == hidden.dtype:
                grad_weight.addmm_(gradient.T, hidden[block])
            else:
                grad_weight += gradient.T @ hidden[block]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.rows, ctx.weight_dtype = hidden.shape[0], weight.dtype
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0] / ctx.rows
        return grad_hidden.mul_(scale), grad_weight.mul_(scale).to(ctx.weight_dtype), None, None, None


def _block(logits: Tensor, targets: Tensor, z_loss: float, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a block of rows, and its gradient by this process's logits, FP32."""
    logits = logits.float()
    if group is None:
        if z_loss == 0.0:  # the usual case, with one pass fewer
            logits = F.log_softmax(logits, dim=-1)
            loss = -logits.gather(1, targets).sum()
            return loss, _minus_one_at(logits.exp_(), targets, None)
        log_sum = logits.logsumexp(-1, keepdim=True)
        at_target, mine = logits.gather(1, targets), None
    else:
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        targets = targets - dist.get_rank(group) * logits.shape[1]
        mine = (targets >= 0) & (targets < logits.shape[1])
        targets = targets.clamp(0, logits.shape[1] - 1)
        sums = torch.cat(((logits - largest).exp().sum(-1, keepdim=True), logits.gather(1, targets) * mine), dim=-1)
        dist.all_reduce(sums, group=group)
        log_sum, at_target = sums[:, :1].log() + largest, sums[:, 1:]
    gradient = logits.sub_(log_sum).exp_()
    if z_loss:
        gradient.mul_(1.0 + 2.0 * z_loss * log_sum)
    return (log_sum - at_target).sum(), _minus_one_at(gradient, targets, mine)


def _minus_one_at(gradient: Tensor, targets: Tensor, mine: Tensor | None) -> Tensor:
    """Subtract 1 at each row's target, if the target is among this process's entries."""
    ones = gradient.new_full((1, 1), -1.0).expand_as(targets) if mine is None else -mine.to(gradient.dtype)
    return gradient.scatter_add_(1, targets, ones)


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the mean loss in nats per token, FP32. It can be differentiated once.

    Args:
        hidden: (..., hidden) inputs of the output projection. The products use their precision, the softmax FP32.
            With a group, each process gets only the gradient that its own entries cause.
        weight: (vocabulary, hidden) of the output projection, or this process's rows of it.
        targets: (...) ids of the next tokens, int64.
        z_loss: weight of the squared log of the softmax's denominator (PaLM, arXiv 2204.02311, section 5). It changes
            only the gradients; the value stays the cross-entropy, comparable to runs without it.
        group: the processes over which ``weight`` is sharded by vocabulary, in equal slices in the order of ranks.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _FusedCrossEntropy.apply(flat, weight, targets.reshape(-1), z_loss, group)  # type: ignore[no-any-return,no-untyped-call]
