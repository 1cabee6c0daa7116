"""Muon's update of each linear map's matrix is that of PyTorch's Muon, regardless of packing and layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conf.schema import ModelConfig, OptimizerConfig
from tests.trainer.conftest import Finish, MakeRun, Start
from trainer.model import Llama
from trainer.muon import Muon
from trainer.optim import ParameterShard

MODEL = ModelConfig(
    vocab_size=64, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2
)  # gate and up have other blocks than heads
_STEPS = 3


def unpacked(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The matrices of a parameter, as the model's forward pass separates them; {} for others than layers' matrices."""
    hidden, head = MODEL.hidden_size, MODEL.head_dim
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


def train(optimizer: Muon, model: nn.Module, *, lr: Callable[[int], float | Tensor]) -> None:
    """Steps with random gradients."""
    generator = torch.Generator().manual_seed(1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad.copy_(gradient)
        optimizer.collect_gradients()
        optimizer.step(lr=lr(step), number=step + 1, divisor=torch.tensor(2.0))  # type: ignore[arg-type]


def model_and_optimizer(dtype: torch.dtype = torch.float32, **options: object) -> tuple[Llama, Muon]:
    torch.manual_seed(0)
    model = Llama(MODEL, 8).to(dtype)
    shards = {name: ParameterShard(parameter=parameter) for name, parameter in model.named_parameters()}
    config = OptimizerConfig(name="muon", weight_decay=0.1, momentum=0.9)
    return model, Muon(shards, config, model=MODEL, **options)


def reference(model: Llama, name: str) -> dict[str, Tensor]:
    """What PyTorch's Muon makes of a parameter's unpacked matrices."""
    matrices = {
        part: nn.Parameter(matrix.clone())
        for part, matrix in unpacked(name, model.get_parameter(name).detach()).items()
    }
    muon = torch.optim.Muon(matrices.values(), lr=0.0, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for step in range(_STEPS):
        for other, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if other == name:
                for part, matrix in unpacked(name, gradient).items():
                    matrices[part].grad = 0.5 * matrix
        for group in muon.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        muon.step()  # type: ignore[no-untyped-call]
    return {part: matrix.detach() for part, matrix in matrices.items()}


_MATRICES = ("attention.qkv.weight", "attention.o.weight", "mlp.gate_up.weight", "mlp.down.weight")


def test_the_update_of_each_matrix_is_that_of_pytorch_s_muon() -> None:
    model, optimizer = model_and_optimizer()
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in _MATRICES]
    expected = {name: reference(model, name) for name in names}
    train(optimizer, model, lr=lambda step: 1e-2 / (1 + step))
    for name in names:
        for part, matrix in unpacked(name, model.get_parameter(name).detach()).items():
            torch.testing.assert_close(matrix, expected[name][part], rtol=1e-6, atol=1e-7, msg=f"{name} {part}")


@pytest.mark.processes
def test_every_layout_makes_the_same_bits_of_equal_gradients(
    tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish
) -> None:
    layouts: list[tuple[dict[str, object], int]] = [
        ({"tensor_parallel_size": 2}, 52),
        ({"tensor_parallel_size": 2, "data_parallel": "fsdp"}, 52),
        ({"data_parallel": "fsdp"}, 53),
        ({"data_parallel": "fsdp", "fsdp_size": 2}, 52),
        ({"data_parallel": "zero1", "fsdp_size": 1, "tensor_parallel_size": 2}, 52),
        ({"pipeline_parallel_size": 2}, 52),
    ]
    folders = []
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
        folders.append(os.fspath(run.root))
    finish(start("tests/trainer/muon_layouts.py", *folders, processes=4))
