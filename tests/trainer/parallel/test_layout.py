"""Which processes of a replica read its data, and when gradients are exchanged during the last backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from conf.schema import Config, DataConfig, OptimizerConfig
from trainer.optim.adamw import AdamW, ParameterShard
from trainer.parallel import layout
from trainer.parallel.layout import Layout, OverlappedSum


def data_ranks(rank: int, pp: int, dp: int, tp: int, masked: bool = False) -> list[int]:
    mesh: Any = SimpleNamespace(mesh=torch.arange(pp * dp * tp).view(pp, dp, tp).transpose(1, 2))
    config = Config(data=DataConfig(mask_across_documents=masked))
    return Layout(config=config, mesh=mesh, dp_rank=rank // tp % dp).data_ranks(rank)


def test_each_replica_has_one_reader_on_each_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [data_ranks(rank, 1, 2, 2) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [data_ranks(rank, 1, 1, 8) for rank in (0, 7)] == [[0, 1, 2, 3], [4, 5, 6, 7]], "a replica on two nodes"
    assert data_ranks(3, 1, 4, 1) == [3], "nothing to share"


def test_only_the_first_and_the_last_stage_need_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert {tuple(data_ranks(rank, 3, 1, 2)) for rank in range(6)} == {(0, 1, 4, 5)}, "one node has all stages"
    assert data_ranks(0, 3, 1, 2, masked=True) == [0, 1, 2, 3, 4, 5], "a mask needs them everywhere"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [data_ranks(rank, 3, 1, 2) for rank in (0, 3, 5)] == [[0, 1], [], [4, 5]], "each node has a stage"


def test_processes_of_unknown_nodes_read_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [data_ranks(rank, 1, 1, 2) for rank in range(2)] == [[0], [1]]


def test_the_first_reader_of_a_replica_is_the_process_that_saves_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if ranks are ordered in another way, as a library may do."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh: Any = SimpleNamespace(mesh=torch.tensor([[[3], [1]], [[2], [0]]]))
    assert Layout(config=Config(), mesh=mesh, dp_rank=0).data_ranks(0)[0] == 3


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
    monkeypatch.setattr(layout, "BUCKET_ENTRIES", 20)
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
