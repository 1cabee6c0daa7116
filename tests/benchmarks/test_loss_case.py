"""The exact gradient to which ``benchmarks.loss_case`` compares each loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.loss_case import exact_gradient
from trainer.model.loss import cross_entropy


def test_the_exact_gradient_is_that_of_a_loss_in_fp64() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(8, 16, dtype=torch.bfloat16)
    weight, targets = torch.randn(32, 16) * 0.3, torch.randint(32, (8,))
    exact = hidden.double().requires_grad_()
    F.cross_entropy(exact @ weight.double().T, targets).backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    found = exact_gradient(hidden, weight, targets, rows=3)  # the last block has fewer
    assert torch.allclose(found.double(), exact.grad, rtol=1e-5, atol=1e-8)
    ours = hidden.clone().requires_grad_()
    cross_entropy(ours, weight, targets).backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    off = float((ours.grad.float() - found).norm() / found.norm())
    assert 1e-4 < off < 1e-2  # BF16 rounds to 2^-9
