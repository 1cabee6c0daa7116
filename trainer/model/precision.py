"""The number formats of each ``precision.name``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Number formats. Gradient reduction, norms, softmax and cross-entropy always use FP32.

    Args:
        weights: format of weights, moments and accumulated gradients.
        compute: format of matrix products and activations.
        stochastic_rounding: round updated weights and moments stochastically.
        fp8: the inputs of the layers' matrix products are FP8.
    """

    weights: torch.dtype
    compute: torch.dtype
    stochastic_rounding: bool = False
    fp8: bool = False

    @property
    def fastest(self) -> str:
        """Return the format whose peak limits the speed, as ``conf.devices`` names it."""
        return "float8" if self.fp8 else str(self.compute).removeprefix("torch.")


#: Values by ``precision.name`` (HLAT, arXiv 2404.10630, section 3.3).
PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "bf16_sr": Precision(torch.bfloat16, torch.bfloat16, stochastic_rounding=True),
    "mixed": Precision(torch.float32, torch.bfloat16),
    "fp8": Precision(torch.float32, torch.bfloat16, fp8=True),
}
