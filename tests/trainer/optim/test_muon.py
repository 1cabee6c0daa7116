"""Muon's update of each linear map's matrix is that of PyTorch's Muon, regardless of packing and layout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.schema import ModelConfig, OptimizerConfig
from tests.trainer.conftest import EventsOf, MakeRun, Ranks, TrainHere
from trainer.checkpoint.shards import read_tensors
from trainer.model.decoder import Llama
from trainer.optim.adamw import AdamW, ParameterShard
from trainer.optim.muon import Muon

MODEL = ModelConfig(
    vocab_size=64, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2
)  # gate and up have other blocks than heads
_MATRICES = ("attention.qkv.weight", "attention.o.weight", "mlp.gate_up.weight", "mlp.down.weight")
_STEPS = 3


def unpacked(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The matrices of a parameter, as the model's forward pass separates them; {} for others than layers' matrices."""
    hidden, head = MODEL.hidden_size, MODEL.head_width
    queries = MODEL.num_heads // MODEL.num_kv_heads
    if name.endswith("qkv.weight"):
        groups = weight.reshape(-1, queries + 2, head, hidden)
        parts = torch.split(groups, [queries, 1, 1], dim=1)
        return {part: rows.reshape(-1, hidden) for part, rows in zip("qkv", parts, strict=True)}
    if name.endswith("gate_up.weight"):
        mlp = next(Llama(MODEL, 8).blocks()).mlp
        gate, up = weight.reshape(-1, 2, mlp.block_rows, hidden).unbind(1)
        return {"gate": gate.reshape(-1, hidden), "up": up.reshape(-1, hidden)}
    return {"": weight} if name.endswith(("attention.o.weight", "down.weight")) else {}


def model_and_optimizer(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Llama, Muon]:
    torch.manual_seed(0)
    model = Llama(MODEL, 8).to(dtype)
    shards = {name: ParameterShard(parameter=parameter) for name, parameter in model.named_parameters()}
    return model, Muon(shards, OptimizerConfig(name="muon", momentum=0.9), model=MODEL, **options)


def train(optimizer: AdamW) -> None:
    """Take three steps with random gradients, which are halved."""
    generator = torch.Generator().manual_seed(1)
    for step in range(1, _STEPS + 1):
        for name, parameter in optimizer.parameters():
            optimizer.gradient(name).copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step(lr=_rate(step), number=step, divisor=torch.tensor(2.0))


def _rate(step: int) -> float:
    return 1e-2 / step


def reference(optimizer: Muon, wanted: str) -> dict[str, Tensor]:
    """What PyTorch's Muon makes of a parameter's unpacked matrices."""
    weight = dict(optimizer.parameters())[wanted].detach()
    matrices = {part: nn.Parameter(matrix.clone()) for part, matrix in unpacked(wanted, weight).items()}
    muon = torch.optim.Muon(matrices.values(), lr=0.0, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for step in range(1, _STEPS + 1):
        for name, parameter in optimizer.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            for part, matrix in unpacked(name, gradient).items() if name == wanted else ():
                matrices[part].grad = matrix / 2
        for group in muon.param_groups:
            group["lr"] = _rate(step)
        muon.step()  # type: ignore[no-untyped-call]
    return {part: matrix.detach() for part, matrix in matrices.items()}


def test_the_update_of_each_matrix_is_that_of_pytorch_s_muon() -> None:
    model, optimizer = model_and_optimizer()
    names = [name for name, weight in model.named_parameters() if name.startswith("layers.") and weight.ndim == 2]
    expected = {name: reference(optimizer, name) for name in names}
    train(optimizer)
    assert len(names) == 2 * 4
    for name in names:
        for part, matrix in unpacked(name, model.get_parameter(name).detach()).items():
            torch.testing.assert_close(matrix, expected[name][part], rtol=1e-6, atol=1e-7, msg=f"{name} {part}")


def test_embedding_head_and_norms_are_adamw_s() -> None:
    model, optimizer = model_and_optimizer()
    twin = Llama(MODEL, 8)
    twin.load_state_dict(model.state_dict())
    adamw = AdamW(
        {name: ParameterShard(parameter=parameter) for name, parameter in twin.named_parameters()}, OptimizerConfig()
    )
    train(optimizer)
    train(adamw)
    moments = {name.removeprefix("exp_avg_sq.") for name in optimizer.tensors() if name.startswith("exp_avg_sq.")}
    assert moments == {name for name, weight in model.named_parameters() if not name.endswith(_MATRICES)}
    for name in moments:
        torch.testing.assert_close(model.get_parameter(name), twin.get_parameter(name))


@pytest.mark.parametrize("stochastic", [True, False])
def test_bf16_weights_follow_those_in_fp32(stochastic: bool) -> None:
    exact, optimizer = model_and_optimizer()
    rounded, other = model_and_optimizer(torch.bfloat16, stochastic_rounding=stochastic, seed=7)
    before = {name: weight.detach().clone() for name, weight in exact.named_parameters()}
    train(optimizer)
    train(other)
    for name, weight in exact.named_parameters():
        moved, error = (weight - before[name]).norm(), (rounded.get_parameter(name).float() - weight).norm()
        assert moved > 0, name
        assert error < 0.02 * weight.norm(), name


def test_noise_depends_on_seed_and_step_alone() -> None:
    def trained(seed: int) -> dict[str, Tensor]:
        optimizer = model_and_optimizer(torch.bfloat16, stochastic_rounding=True, seed=seed)[1]
        torch.rand(seed)
        train(optimizer)
        return {name: tensor.clone() for name, tensor in optimizer.tensors().items() if name.endswith(_MATRICES)}

    once, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(torch.equal(once[name], other[name]) for name in once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing(dtype: torch.dtype) -> None:
    _, optimizer = model_and_optimizer(dtype, stochastic_rounding=dtype == torch.bfloat16)
    train(optimizer)
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    for name, _ in optimizer.parameters():
        optimizer.gradient(name).fill_(torch.nan)
    optimizer.step(lr=1e-2, number=4, divisor=torch.tensor(torch.nan), skip=torch.tensor(1.0))
    assert optimizer.step_count == _STEPS
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors().items())


def test_a_run_resumes_with_the_same_bits(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    whole, parted = (
        make_run(tmp_path / name, optimizer={"name": "muon"}, precision={"name": "bf16_sr"}) for name in ("a", "b")
    )
    assert train_here(whole, 1) == 0
    parted.checkpoints.mkdir()
    shutil.copytree(whole.checkpoint(16), parted.checkpoint(16))
    assert train_here(parted, 2) == 0
    assert events_of(parted, "train_started", 2)[0]["resumed_from_step"] == 16
    ours, theirs = (read_tensors(run.checkpoint(24), bool) for run in (parted, whole))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.processes
def test_every_layout_makes_the_same_bits_of_equal_gradients(tmp_path: Path, make_run: MakeRun, ranks: Ranks) -> None:
    layouts: list[tuple[dict[str, object], int]] = [
        ({"tensor_parallel_size": 2}, 52),
        ({"tensor_parallel_size": 2, "data_parallel": "fsdp"}, 52),
        ({"data_parallel": "fsdp"}, 53),
        ({"data_parallel": "fsdp", "fsdp_size": 2}, 52),
        ({"data_parallel": "zero1", "fsdp_size": 1, "tensor_parallel_size": 2}, 52),
        ({"pipeline_parallel_size": 2}, 52),
    ]
    jobs = []
    for number, (parallel, intermediate_size) in enumerate(layouts):
        run = make_run(
            tmp_path / str(number),
            parallel=parallel,
            # Shards begin in the middle of heads and of blocks of gate and up. 2 x 53 rows give uneven ones.
            model={"hidden_size": 40, "intermediate_size": intermediate_size},
            optimizer={"name": "muon"},
            cluster={"processes_per_node": 4},
            train={"micro_batch_size": 1},
        )
        jobs.append({"work": "muon", "run": os.fspath(run.root)})
    ranks(4, jobs)
