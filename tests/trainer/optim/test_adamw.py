"""AdamW: FSDP adds gradients of FP32 weights to the optimizer's buffer, and stochastic rounding is exact on average."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from conf.schema import ModelConfig, OptimizerConfig
from trainer.optim import adamw
from trainer.optim.adamw import AdamW, ParameterShard, local, rounded_stochastically


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_micro_batches_exist_once_and_add_up_in_fp32(
    mesh: DeviceMesh, dtype: torch.dtype, sharded: bool
) -> None:
    """A sum of 257 is between two numbers of BF16."""
    linear = nn.Linear(8, 8, bias=False, dtype=dtype)
    if sharded:
        fully_shard(linear, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(linear.weight, nn.Parameter)
    optimizer = AdamW({"weight": ParameterShard(parameter=linear.weight, sharded=sharded)}, OptimizerConfig())
    for _ in range(2):
        optimizer.zero_grad()
        for value in (256.0, 1.0):
            linear(torch.full((1, 8), value, dtype=dtype)).sum().backward()
        assert optimizer.gradients.tolist() == [257.0] * 64
        gradient = linear.weight.grad
        assert (gradient is None) == (dtype == torch.bfloat16)
        assert gradient is None or local(gradient).data_ptr() == optimizer.gradients.data_ptr()


_TRIALS = 4096


def _rounded(value: float, trials: int = _TRIALS) -> torch.Tensor:
    noise = torch.randint(1 << 16, (trials,), generator=torch.Generator().manual_seed(1))
    rounded = rounded_stochastically(torch.full((trials,), value), noise)
    assert torch.equal(rounded.bfloat16().float().nan_to_num(), rounded.nan_to_num()), "BF16 can hold it"
    return rounded


@given(st.floats(-(2.0**99), 2.0**99, width=32))
def test_value_is_rounded_to_one_of_its_two_neighbours(value: float) -> None:
    below = torch.tensor(value).view(torch.int32) // 2**16 * 2**16
    neighbours = {below.view(torch.float32).item(), (below + 2**16).view(torch.float32).item()}
    assert set(_rounded(value, 64).tolist()) <= neighbours


@pytest.mark.parametrize("value", [1.0, 1.001, -3.003, 1e-20, 0.3])
def test_mean_of_many_roundings_is_the_value_within_its_standard_error(value: float) -> None:
    rounded = _rounded(value)
    error = rounded.std().item() / math.sqrt(_TRIALS)
    assert abs(rounded.double().mean().item() - value) <= 4 * error + 1e-7 * abs(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0])
def test_what_is_not_finite_or_exact_stays(value: float) -> None:
    assert torch.equal(_rounded(value, 8), torch.full((8,), value)) or math.isnan(value)
    assert not math.isnan(value) or bool(_rounded(value, 8).isnan().all())


@pytest.mark.parametrize("stochastic", [True, False])
def test_small_updates_arrive_on_average_only_if_rounded_stochastically(stochastic: bool) -> None:
    """A hundred updates of a weight of 1 by a tenth of what BF16 can hold; FP32 is the reference."""
    config = OptimizerConfig(weight_decay=0.0)

    def train(dtype: torch.dtype) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(_TRIALS, dtype=dtype))
        optimizer = AdamW({"weight": ParameterShard(parameter=weight)}, config, stochastic_rounding=stochastic, seed=3)
        for number in range(100):
            optimizer.gradients.fill_(1.0)
            optimizer.step(lr=4e-4, number=number)
        return weight.detach().float()

    exact, rounded = train(torch.float32), train(torch.bfloat16)
    assert exact.mean().item() == pytest.approx(1.0 - 100 * 4e-4, rel=1e-3)
    if stochastic:
        error = rounded.std().item() / math.sqrt(_TRIALS)
        assert abs(rounded.mean().item() - exact.mean().item()) <= 4 * error
    else:
        assert torch.equal(rounded, torch.ones(_TRIALS))


def test_noise_depends_on_seed_and_step_alone() -> None:
    def train(seed: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 999).bfloat16())
        optimizer = AdamW(
            {"weight": ParameterShard(parameter=weight)}, OptimizerConfig(), stochastic_rounding=True, seed=seed
        )
        for number in range(3):
            torch.rand(7)
            optimizer.gradients.fill_(0.5)
            optimizer.step(lr=1e-3, number=number)
        return weight.detach()

    assert torch.equal(train(1), train(1))
    assert not torch.equal(train(1), train(2))
    assert not torch.equal(train(2**64 - 2), train(2**64 - 1)), "every seed that a configuration may have is one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_mup_a_matrix_moves_less_the_wider_the_model_and_decays_the_same(dtype: torch.dtype) -> None:
    model = ModelConfig(hidden_size=256, mup_base_width=64)
    names = ("embedding.weight", "layers.0.mlp.down.weight", "head.weight", "norm.weight")

    def moved(gradient: float, decay: float) -> list[float]:
        weights = {name: nn.Parameter(torch.ones(8, dtype=dtype)) for name in names}
        shards = {name: ParameterShard(parameter=weight) for name, weight in weights.items()}
        optimizer = AdamW(shards, OptimizerConfig(weight_decay=decay), model=model)
        optimizer.gradients.fill_(gradient)
        optimizer.step(lr=0.25, number=1)
        return [round(float((1.0 - weight.detach().float()).mean()), 4) for weight in weights.values()]

    assert moved(1.0, 0.0) == [0.25, 0.0625, 0.0625, 0.25]
    assert moved(0.0, 0.5) == [0.125] * 4, "a step of AdamW is lr x decay, without the factor of the width"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_the_weights_forgets_the_first_ones_and_counts_no_skipped_update(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = AdamW({"weight": ParameterShard(parameter=weight)}, OptimizerConfig(ema_decay=0.5))
    expected = torch.zeros(3)
    for number, skip in enumerate([0.0, 1.0, 0.0, 0.0, *[0.0] * 12]):
        updates = optimizer.step_count
        optimizer.gradients.fill_(1.0)
        optimizer.step(lr=0.1, number=number, skip=torch.tensor(skip))
        if not skip:
            decay = min(0.5, updates / (updates + 9))
            expected = decay * expected + (1 - decay) * weight.detach().float()
    average = optimizer.tensors()["ema.weight"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, expected)
    assert not torch.equal(average, weight.detach().float())


def test_without_a_decay_there_is_no_average() -> None:
    optimizer = AdamW({"weight": ParameterShard(parameter=torch.nn.Parameter(torch.ones(3)))}, OptimizerConfig())
    optimizer.step(lr=0.1, number=1)
    assert optimizer.tensors().keys() == {"model.weight", "exp_avg.weight", "exp_avg_sq.weight"}


def test_a_compiled_update_has_the_same_bits_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, learning rates and steps are new; one update is skipped. Inductor would take ten seconds."""
    monkeypatch.setattr(adamw, "_BLOCK_ENTRIES", 100)

    def optimizer(compile_backend: str | None) -> AdamW:
        random = torch.Generator().manual_seed(5)
        shapes = {"up.weight": (24, 7), "norm.weight": (33,), "down.weight": (11, 30)}
        shards = {
            name: ParameterShard(parameter=nn.Parameter(torch.randn(shape, generator=random).bfloat16()))
            for name, shape in shapes.items()
        }
        return AdamW(shards, OptimizerConfig(), stochastic_rounding=True, seed=4, compile_backend=compile_backend)

    plain, compiled = optimizer(None), optimizer("aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(4):
            gradients = torch.randn(plain.gradients.shape, generator=torch.Generator().manual_seed(number))
            for each in (plain, compiled):
                each.gradients.copy_(gradients)
                skip = torch.tensor(float(number == 2))
                each.step(lr=1e-2 / (number + 1), number=number, divisor=torch.tensor(2.0), skip=skip)
    before, after = plain.tensors(), compiled.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert compiled.step_count == 3
