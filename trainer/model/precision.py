"""The number formats of each ``precision.name``, and FP8 products by torchao.

FP8: each input of a product is scaled and rounded for it; the sum has the input's precision. Inputs and weights are
rounded to E4M3 (3 bits of mantissa), gradients according to torchao's recipes ``rowwise`` and ``tensorwise``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.devices import DEVICES
from conf.schema import Config
from hlatctl.run.errors import DependencyError
from trainer.model.decoder import Linear, Llama


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


def check_fp8(config: Config, device: torch.device) -> None:
    """Check that this node has what ``precision=fp8`` needs, if that is set.

    Raises a DependencyError if torchao is not installed, or the device has no FP8 products.
    """
    if config.precision.name != "fp8":
        return
    if importlib.util.find_spec("torchao") is None:
        raise DependencyError(
            "precision.name=fp8: torchao is not installed", hint="pip install 'hlatctl[fp8]', or set precision=mixed"
        )
    needed = DEVICES[device.type].fp8_capability
    if needed is None:
        return  # refused before a run exists; tests emulate products
    capability = torch.get_device_module(device).get_device_capability(device)
    if tuple(capability) < needed:
        raise DependencyError(
            f"precision.name=fp8: needs compute capability {needed[0]}.{needed[1]}, but this device has "
            f"{capability[0]}.{capability[1]}",
            hint="set precision=mixed",
        )


def use_fp8(model: Llama, scaling: str, *, emulate: bool) -> None:
    """Make the linear layers of decoder layers multiply in FP8, without embedding and head.

    Args:
        scaling: value of ``precision.fp8_scaling``.
        emulate: round to FP8 and multiply the rounded values in the input's precision, for devices without it.
    """
    product = _Product(scaling, emulate)
    for layer in model.blocks():
        for module in layer.modules():
            if isinstance(module, Linear):
                module.product = product


class _Product:
    """The product of an input (..., in) and a weight (out, in), as torchao's own linear layer computes it."""

    def __init__(self, scaling: str, emulate: bool) -> None:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        config: Any = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
        products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        self._product: Any = matmul_with_hp_or_float8_args
        self._config = config
        self._products: Any = LinearMMConfig(
            *(ScaledMMConfig(emulate, one.use_fast_accum, False, config.pad_inner_dim) for one in products)
        )

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product.apply(x, weight.t(), self._products, self._config)  # type: ignore[no-any-return]
