"""Stochastic rounding of FP32 to BF16: the mean over many roundings is the exact value.

Rounding to the nearest loses every update below half a unit in the last place (1/256 of a weight). Stochastic rounding
keeps it with the right probability (HLAT, arXiv 2404.10630, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: BF16 is the upper half of FP32.
_LOWER_BITS = 16


@torch.no_grad()
def stochastic_round_(target: Tensor, exact: Tensor, generator: torch.Generator) -> None:
    """Write FP32 values into a BF16 tensor of the same shape, rounded up or down in proportion to their distance.

    NaN and infinities don't change.
    """
    bits = exact.contiguous().view(torch.int32)
    noise = torch.randint(1 << _LOWER_BITS, bits.shape, dtype=torch.int32, device=generator.device, generator=generator)
    rounded = (
        (bits + noise.to(bits.device))
        .bitwise_right_shift_(_LOWER_BITS)
        .bitwise_left_shift_(_LOWER_BITS)
        .view(torch.float32)
    )
    target.copy_(torch.where(exact.isfinite(), rounded, exact))
