"""Where gradients are: FSDP adds those of FP32 weights to the optimizer's buffer, so that they exist once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from conf.schema import OptimizerConfig
from trainer.optim import AdamW, ParameterShard, local


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp_s_gradients_of_fp32_weights_exist_once_and_add_up(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    linear = nn.Linear(8, 8, bias=False, dtype=dtype)
    fully_shard(linear, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(linear.weight, nn.Parameter)
    optimizer = AdamW({"weight": ParameterShard(parameter=linear.weight, sharded=True)}, OptimizerConfig())
    for _ in range(2):
        optimizer.zero_grad()
        for value in (1.0, 2.0):
            linear(torch.full((1, 8), value, dtype=dtype)).sum().backward()
        gradient = linear.weight.grad
        assert gradient is not None
        once = local(gradient).data_ptr() == optimizer.gradients.data_ptr()
        assert once == (dtype == torch.float32), "BF16 weights have BF16 gradients of their own beside the FP32 buffer"
        optimizer.collect_gradients()
        assert optimizer.gradients.tolist() == [3.0] * 64
