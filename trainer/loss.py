"""Next-token cross-entropy fused with the output projection, a block of rows at a time. Nothing else.

The logits of a whole batch (rows x vocabulary, FP32) are never held: a block's logits are made, turned into their own
gradient and used up while they are in the cache. The products are the same three as forward and backward of a linear
layer, so nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows of logits at once: 512 x 8,192 FP32 are 16 MiB. On CPUs 128 to 512 are equally fast; above, memory decides.
BLOCK_ROWS = 512


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            logits = F.log_softmax(hidden[block] @ weight.T, dim=-1)
            target = targets[block, None]
            total -= logits.gather(1, target).sum()
            gradient = logits.exp_()
            gradient.scatter_add_(1, target, gradient.new_full((1, 1), -1.0).expand_as(target))
            torch.mm(gradient, weight, out=grad_hidden[block])
            grad_weight.addmm_(gradient.T, hidden[block])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.rows = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0] / ctx.rows
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), None


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per token; may be differentiated once.

    Args:
        hidden: (..., hidden) states that the output projection reads.
        weight: (vocabulary, hidden) of the output projection.
        targets: (...) ids of the next tokens, int64.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _FusedCrossEntropy.apply(flat, weight, targets.reshape(-1))  # type: ignore[no-any-return,no-untyped-call]
