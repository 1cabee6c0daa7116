"""When gradients are exchanged: bucket by bucket, during the step's last backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from conf.schema import OptimizerConfig
from trainer import reduction
from trainer.optim import AdamW, ParameterShard
from trainer.reduction import OverlappedSum


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What happens, in order: the sizes of exchanges, and the names of layers whose backward pass begins."""
    events: list[Any] = []
    real = dist.all_reduce

    def record(tensor: torch.Tensor, **options: Any) -> Any:
        events.append(tensor.numel())
        return real(tensor, **options)

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "all_reduce", record)
    monkeypatch.setattr(reduction, "BUCKET_ENTRIES", 20)
    yield events
    dist.destroy_process_group()


def _layers(events: list[Any], dtype: torch.dtype) -> nn.Sequential:
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=dtype) for _ in range(4)))
    for name, layer in layers.named_children():
        layer.register_full_backward_pre_hook(lambda *_, name=name: events.append(name))
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_exchanged_while_earlier_layers_are_still_computed(
    exchanged: list[Any], dtype: torch.dtype
) -> None:
    layers = _layers(exchanged, dtype)
    optimizer = AdamW({n: ParameterShard(parameter=p) for n, p in layers.named_parameters()}, OptimizerConfig())
    overlapped = OverlappedSum(optimizer, dist.group.WORLD, passes=2)  # type: ignore[arg-type]
    x = torch.ones(1, 4, dtype=dtype, requires_grad=True)
    for _ in range(2):
        exchanged.clear()
        optimizer.zero_grad()
        overlapped.begin()
        for _ in range(2):
            layers(x).sum().backward()
        assert exchanged == ["3", "2", "1", "0", "3", "2", 32, "1", "0", 32], "two layers of 16 make a bucket of 20"
        overlapped.finish()
        assert exchanged.count(32) == 2
    expected = torch.cat([2 * g.flatten() for g in torch.autograd.grad(layers(x).sum(), list(layers.parameters()))])
    torch.testing.assert_close(optimizer.gradients, expected.float())


def test_gradients_that_no_backward_pass_reports_are_exchanged_at_the_end(exchanged: list[Any]) -> None:
    layers = _layers(exchanged, torch.float32)
    optimizer = AdamW({n: ParameterShard(parameter=p) for n, p in layers.named_parameters()}, OptimizerConfig())
    overlapped = OverlappedSum(optimizer, dist.group.WORLD, passes=1)  # type: ignore[arg-type]
    overlapped.begin()
    layers[1](torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert exchanged == ["1"]
    overlapped.finish()
    assert exchanged == ["1", 32, 32]
