"""Shards of processes that share a key/value head: together they are the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.schema import ModelConfig
from hlatctl.run.errors import ConfigError
from trainer.checkpoint.shards import INDEX, compose, load_tensors, read_tensors, save_tensors
from trainer.model.decoder import Attention, Parts, rotary_tables
from trainer.model.initial import initial_slice
from trainer.parallel.tensor import SharedHeads, UnevenShard

#: Two key/value heads and four processes, each with two of the eight query heads.
MODEL = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=8, num_kv_heads=2)
QKV, OUT = "layers.0.attention.qkv.weight", "layers.0.attention.o.weight"
#: NxD's groups on trn1, for two replicas.
STRIDED = [[0, 2], [1, 3], [4, 6], [5, 7]]
PLACES = [SharedHeads.of(MODEL, rank, [4, 5, 6, 7], STRIDED) for rank in (4, 5, 6, 7)]
#: Whole shapes and shards: (2 heads) x (4 queries + 2) rows of 2, and 2 queries + 2; 8 heads and 2.
SHAPES, SLICES = {QKV: [24, 16], OUT: [16, 16]}, {QKV: [8, 16], OUT: [16, 4]}


@pytest.fixture(scope="module")
def wholes() -> dict[str, Tensor]:
    return {name: initial_slice(name, shape, Parts(), MODEL, seed=7) for name, shape in SHAPES.items()}


def slices_of(wholes: dict[str, Tensor], heads: SharedHeads) -> dict[str, Tensor]:
    return {name: spec.shard_of(whole) for name, whole in wholes.items() if (spec := heads.shard_spec(name))}


def as_distributed(name: str, part: Tensor, heads: SharedHeads, first_row: int = 0) -> Tensor:
    spec = heads.shard_spec(name)
    assert spec is not None
    return spec.as_distributed(part, first_row, SLICES[name][0])


def test_groups_decide_which_processes_share_a_head() -> None:
    assert [(place.kv_head, place.replica) for place in PLACES] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    neighbours = [SharedHeads.of(MODEL, rank, [0, 1, 2, 3], [[0, 1], [2, 3]]) for rank in range(4)]
    assert [(place.kv_head, place.replica) for place in neighbours] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(ConfigError, match=r"num_kv_heads=2, parallel\.tensor_parallel_size=4: .* do not lie within"):
        SharedHeads.of(MODEL, 1, [1, 9, 17, 25], STRIDED)


def test_attention_of_all_processes_adds_up_to_that_of_the_whole_layer(wholes: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(1, 6, 16), rotary_tables(6, MODEL)
    total = torch.zeros_like(x)
    for rank, heads in enumerate(PLACES):
        attention = Attention(MODEL, Parts(rank, 4, heads))
        attention.load_state_dict({name.split(".", 3)[-1]: part for name, part in slices_of(wholes, heads).items()})
        total += attention(x, cos, sin, None)
    whole = Attention(MODEL, Parts())
    whole.load_state_dict({name.split(".", 3)[-1]: part for name, part in wholes.items()})
    assert torch.allclose(total, whole(x, cos, sin, None), atol=1e-6)


def test_initial_weights_are_slices_of_the_whole_models(wholes: dict[str, Tensor]) -> None:
    for rank, heads in enumerate(PLACES):
        for name, part in slices_of(wholes, heads).items():
            assert part.equal(initial_slice(name, SLICES[name], Parts(rank, 4, heads), MODEL, seed=7)), name


@pytest.mark.parametrize("replicas", [1, 5], ids=["all rows", "four replicas have some rows each, one none"])
def test_a_checkpoint_of_all_shards_is_one_of_the_whole_and_back(
    replicas: int, wholes: dict[str, Tensor], tmp_path: Path
) -> None:
    shards = {}
    for rank, heads in enumerate(PLACES):
        for replica in range(replicas):
            tensors = {}
            for name, part in slices_of(wholes, heads).items():
                share = -(-len(part) // replicas)
                rows = part[replica * share : (replica + 1) * share].clone()
                tensors[name] = as_distributed(name, rows, heads, replica * share)
                assert tensors[name].size() == wholes[name].size()
            if shard := save_tensors(tensors, tmp_path, number=rank * replicas + replica + 1):
                shards[shard.entry["path"]] = shard.chunks
    (tmp_path / INDEX).write_text(compose(shards).text)
    written = read_tensors(tmp_path, lambda name: True)
    assert {name: tensor.equal(wholes[name]) for name, tensor in written.items()} == {QKV: True, OUT: True}
    for heads in PLACES:
        for name, part in slices_of(wholes, heads).items():
            for first, stop in ((0, 8), (3, 7)):
                target = as_distributed(name, torch.zeros_like(part[first:stop]), heads, first)
                load_tensors({name: target}, tmp_path)
                assert isinstance(target, UnevenShard)
                assert target.to_local().equal(part[first:stop]), (name, heads, first)


def test_rows_weighted_and_summed_over_the_processes_count_once(wholes: dict[str, Tensor]) -> None:
    total = torch.zeros(())
    for heads in PLACES:
        spec = heads.shard_spec(QKV)
        assert spec is not None
        total += (spec.shard_of(wholes[QKV]).square() * spec.row_weights(8)).sum()
    assert torch.allclose(total, wholes[QKV].square().sum())


def test_other_parameters_are_sharded_in_the_order_of_ranks() -> None:
    assert [PLACES[0].shard_spec(f"layers.0.{name}.weight") for name in ("mlp.down", "mlp.gate_up", "mlp_norm")] == [
        None
    ] * 3
