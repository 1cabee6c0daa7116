"""FP8 products (``precision=fp8``): torchtitan's with scales of rows, or with one scale a matrix, gathered in FP8.

torchtitan 0.3 has only the first. With the second, weights are tensors of torchao, which FSDP asks what to gather.
Checkpoints have the tensors of mixed precision in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conf.devices import DEVICES
from conf.schema import Config
from hlatctl.run.errors import DependencyError

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec


def convert(config: Config, spec: ModelSpec) -> None:
    """Let the products of layers round their inputs to FP8. Raises a DependencyError if that isn't possible here.

    Without the device they are emulated, uncompiled: tests train so, and a login node can check a configuration.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchtitan.components.quantization import Float8LinearConverter

        device = config.backend.device
        emulate = DEVICES[device].fp8_capability is None or not torch.get_device_module(device).is_available()
        converter = Float8LinearConverter.Config(
            filter_fqns=["lm_head", "router.gate"],
            emulate=emulate,
            model_compile_enabled=config.backend.compile and not emulate,
        ).build()
    except (ImportError, ValueError) as error:
        raise DependencyError(f"precision.name=fp8: {error}", hint="set precision=mixed") from None
    # It also works around wrong kernels of Triton, which torchtitan doesn't (triton-lang/triton, issue 11111).
    convert_to_float8_training(nn.Module())
    if config.precision.fp8_scaling == "tensorwise":
        torch._inductor.config.emulate_precision_casts = False  # torchtitan sets it for scales of rows
        gathers = config.gathers_fp8
        converter.torchao_config = Float8LinearConfig(emulate=emulate, enable_fsdp_float8_all_gather=gathers)
        if gathers:
            spec.parallelize_fn = partial(_parallelize, spec.parallelize_fn)
    spec.model = converter.convert(spec.model)


def _parallelize(parallelize: Any, model: nn.Module, **options: Any) -> nn.Module:
    """Wrap the weights as torchao's own conversion of modules does, before they are sharded."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for module in model.modules():
        if isinstance(module, Float8Linear):
            dtype = module.config.cast_config_weight.target_dtype
            wrapped = WeightWithDynamicFloat8CastTensor(module.weight, module.linear_mm_config, dtype)
            module.weight = nn.Parameter(wrapped, requires_grad=module.weight.requires_grad)
    sharded: nn.Module = parallelize(model, **options)
    return sharded


class Scales:
    """The scales of the weights that FSDP gathers: one all-reduce after each update instead of one for each weight."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts, self._kept = parts, list[Tensor]()

    def update(self) -> None:
        """Compute the scales of the next step. They stay in the same memory, which a captured step reads."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in self._parts:
            precompute_float8_dynamic_scale_for_fsdp(part)
        weights = [
            local for part in self._parts for each in part.parameters() if (local := _gathered(each)) is not None
        ]
        if not self._kept:
            self._kept = [weight._precomputed_scale.clone() for weight in weights]
        torch._foreach_copy_(self._kept, [weight._precomputed_scale for weight in weights])
        for weight, scale in zip(weights, self._kept, strict=True):
            weight._precomputed_scale = scale


def _gathered(parameter: Tensor) -> Any:
    """Return torchao's tensor in a sharded weight; None: it is another one."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return local if hasattr(local, "fsdp_pre_all_gather") else None


def plain(value: Any) -> Any:
    """Return a weight without torchao's tensor, in the same memory; other values as they are."""
    if not isinstance(value, DTensor) or (local := _gathered(value)) is None:
        return value
    size, stride = value.shape, value.stride()
    return DTensor.from_local(
        local._tensor, value.device_mesh, value.placements, run_check=False, shape=size, stride=stride
    )
