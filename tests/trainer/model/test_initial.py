"""The initial weights: their distribution, and their independence of who draws which part."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from conf.schema import ModelConfig
from trainer.model.decoder import Llama
from trainer.model.initial import build, initialize, normal_block

_SMALL = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2)


def test_numbers_are_standard_normal_and_independent_of_their_neighbours() -> None:
    numbers = normal_block(7, torch.arange(2000), range(1001), 1001)
    count = numbers.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10_170)):
        assert abs(numbers.double().pow(power).mean().item() - moment) < 5 * math.sqrt(variance / count), power
    for size in (0.1, 0.5, 1, 2, 3, 4):
        expected = NormalDist().cdf(-size)
        for beyond in (numbers > size, numbers < -size):
            assert abs(int(beyond.sum()) - count * expected) < 5 * math.sqrt(count * expected) + 1, size
    largest = NormalDist().inv_cdf(1 - 0.5 / count)
    assert largest - 1.5 < numbers.abs().max().item() < 6.4
    for other in (numbers.roll(1, 1), numbers.roll(1, 0), normal_block(8, torch.arange(2000), range(1001), 1001)):
        assert abs((numbers * other).mean().item()) < 5 / math.sqrt(count)


def test_the_inverse_of_the_distribution_is_exact_enough() -> None:
    """The sorted numbers are the quantiles of their ranks, within what chance allows."""
    numbers, count = normal_block(0, torch.arange(1000), range(1000), 1000).flatten().sort().values, 10**6
    for rank in range(500, count, 999):
        quantile = rank / count
        expected = NormalDist().inv_cdf(quantile)
        spread = math.sqrt(quantile * (1 - quantile) / count) / NormalDist().pdf(expected)
        assert abs(numbers[rank].item() - expected) < 5 * spread


def test_bits_are_the_same_on_every_machine() -> None:
    """Another PyTorch, processor or operating system must not change a run's beginning."""
    numbers = normal_block(-5, torch.tensor([0, 3, 2**40]), range(2), 5)
    assert numbers.view(torch.int32).tolist() == [
        [-1106890632, 1058300404],
        [-1105071944, 1031587712],
        [1062629250, 1071619964],
    ]


@pytest.mark.parametrize("width", [7, 8])
def test_any_part_of_a_matrix_has_the_bits_of_the_whole(width: int) -> None:
    whole = normal_block(3, torch.arange(9), range(width), width)
    for first in range(width):
        for stop in range(first, width + 1):
            rows = torch.tensor([8, 1, 2])
            assert normal_block(3, rows, range(first, stop), width).equal(whole[rows, first:stop])


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first = dict(build(_SMALL, seq_len=8, seed=3).named_parameters())
    torch.manual_seed(99)
    deeper = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=5, num_heads=4, num_kv_heads=2)
    second = dict(build(deeper, seq_len=64, seed=3).named_parameters())
    other = dict(build(_SMALL, seq_len=8, seed=4).named_parameters())
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_projections_into_the_residual_stream_start_smaller_with_depth() -> None:
    config = ModelConfig(hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=4)
    weights = dict(build(config, seq_len=8, seed=0).named_parameters())
    for layer in (1, 4):
        expected = 0.021 / math.sqrt(2 * layer)
        for name in ("attention.o.weight", "mlp.down.weight"):
            assert weights[f"layers.{layer - 1}.{name}"].std().item() == pytest.approx(expected, rel=0.02)
        assert weights[f"layers.{layer - 1}.attention.qkv.weight"].std().item() == pytest.approx(0.021, rel=0.02)


def test_without_scaled_initialization_they_start_as_all_others_do() -> None:
    scaled, plain = (
        dict(build(replace(_SMALL, scaled_initialization=on), seq_len=8, seed=0).named_parameters())
        for on in (True, False)
    )
    assert torch.allclose(plain["layers.2.mlp.down.weight"], scaled["layers.2.mlp.down.weight"] * math.sqrt(6))
    assert torch.equal(plain["layers.2.attention.qkv.weight"], scaled["layers.2.attention.qkv.weight"])


@pytest.mark.parametrize("layers", [range(2), range(2, 3)])
def test_a_part_has_the_names_and_weights_of_the_whole(layers: range) -> None:
    whole = dict(build(_SMALL, seq_len=8, seed=0).named_parameters())
    part = Llama(_SMALL, 8, layers=layers)
    initialize(part, _SMALL, 0)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in part.named_parameters())
