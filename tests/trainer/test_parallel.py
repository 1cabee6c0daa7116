"""Which processes read the data of a replica, and which receive it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.schema import Config, DataConfig, ParallelConfig
from trainer.parallel import Layout


def data_ranks(rank: int, pp: int, dp: int, tp: int, cp: int = 1, masked: bool = False) -> list[int]:
    ranks = torch.arange(pp * dp * cp * tp).view(pp, dp * cp, tp).transpose(1, 2)
    mesh: Any = SimpleNamespace(mesh=ranks)
    config = Config(parallel=ParallelConfig(context_parallel_size=cp), data=DataConfig(mask_across_documents=masked))
    return Layout(config=config, mesh=mesh, dp_rank=rank // tp // cp % dp).data_ranks(rank)


def test_each_replica_has_one_reader_on_each_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [data_ranks(rank, 1, 2, 2) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [data_ranks(rank, 1, 1, 8) for rank in (0, 7)] == [[0, 1, 2, 3], [4, 5, 6, 7]], "a replica on two nodes"
    assert data_ranks(3, 1, 4, 1) == [3], "nothing to share"
    assert [data_ranks(rank, 1, 2, 1, cp=2) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [data_ranks(rank, 1, 1, 2, cp=4) for rank in (0, 7)] == [[0, 2, 1, 3], [4, 6, 5, 7]], "parts of sequences"


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
