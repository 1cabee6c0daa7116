"""FP8 products, emulated: the values are rounded to FP8 and multiplied in the precision of the input."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from conf.devices import DEVICES
from conf.schema import BackendConfig, Config, ModelConfig, OptimizerConfig, PrecisionConfig, PrecisionName, TrainConfig
from hlatctl.run.errors import DependencyError
from trainer.backends import make_backend
from trainer.model.decoder import Llama
from trainer.model.precision import check_fp8, use_fp8

pytest.importorskip("torchao")

_MODEL = ModelConfig(vocab_size=128, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2)


def configuration(precision: PrecisionName, scaling: Any = "rowwise", *, compiles: bool = False) -> Config:
    return Config(
        model=_MODEL,
        precision=PrecisionConfig(name=precision, fp8_scaling=scaling),
        optimizer=OptimizerConfig(warmup_steps=1),
        train=TrainConfig(global_batch_size=4, micro_batch_size=4, seq_len=64),
        backend=BackendConfig(compile=compiles),
    )


def curve(precision: PrecisionName, scaling: str = "rowwise", *, compiles: bool = False) -> list[float]:
    """Return the losses of 8 steps."""
    backend = make_backend(configuration(precision, scaling, compiles=compiles))
    model = backend.build_model(document_end_id=None)
    optimizer = backend.optimizer(model)
    tokens = torch.arange(4 * 64).reshape(4, 64) * 7 % 128
    losses = []
    for step in range(1, 9):
        optimizer.zero_grad()
        share = backend.forward_backward(model, tokens, (tokens + 7) % 128)
        losses.append(backend.update(optimizer, share, lr=3e-3, step=step)().loss)
    return losses


@pytest.fixture(scope="module")
def mixed() -> list[float]:
    return curve("mixed")


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_the_curve_stays_within_the_rounding_of_fp8(scaling: str, mixed: list[float]) -> None:
    """E4M3 rounds an entry by up to 2^-4; a product averages that over its 64 or more terms."""
    losses = curve("fp8", scaling)
    assert losses == pytest.approx(mixed, rel=5e-3)
    assert losses != pytest.approx(mixed, rel=1e-5), "nothing was rounded"
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize(("scaling", "rows"), [("rowwise", -1), ("tensorwise", None)])
def test_products_are_those_of_inputs_rounded_to_e4m3_and_every_layer_has_them(scaling: str, rows: int | None) -> None:
    model = Llama(_MODEL, 16)
    use_fp8(model, scaling, emulate=True)
    layer = next(model.blocks())
    generator = torch.Generator().manual_seed(1)
    for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
        weight = linear.get_parameter("weight")
        x = torch.randn(32, weight.shape[1], generator=generator)
        expected = rounded(x, rows) @ rounded(weight.detach(), rows).T
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert not torch.allclose(linear(x), x @ weight.T, rtol=1e-3)
    assert model.head is not None
    x = torch.randn(32, 64, generator=generator)
    assert torch.equal(model.head(x), torch.nn.functional.linear(x, model.output_weight))


def rounded(values: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Scale the largest entry to the largest of E4M3, round, and scale back; scales of rows are powers of two."""
    largest = values.abs().max() if rows is None else values.abs().amax(rows, keepdim=True)
    scale = torch.finfo(torch.float8_e4m3fn).max / largest
    scale = scale if rows is None else scale.log2().floor().exp2()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


def test_parameters_have_the_names_and_formats_of_mixed_precision_and_all_get_gradients() -> None:
    kinds, gradients = [], {}
    for precision in ("mixed", "fp8"):
        backend = make_backend(configuration(precision))
        model = backend.build_model(document_end_id=None)
        kinds.append({name: (p.dtype, p.shape) for name, p in model.named_parameters()})
        tokens = torch.arange(4 * 64).reshape(4, 64) % 128
        model(tokens).float().square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if not name.startswith("head")}
    assert kinds[0] == kinds[1]
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.dtype == torch.float32
        assert gradient.abs().max() > 0, name


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_layers_with_fp8_products_are_one_graph_with_the_same_curve(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], compile_backend="aot_eager"))
    assert curve("fp8", scaling, compiles=True) == curve("fp8", scaling)


def test_a_node_without_torchao_or_without_fp8_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def get_device_capability(device: Any) -> tuple[int, int]:
            return capability

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    device = torch.device("cuda", 0)
    capability = (9, 0)
    check_fp8(configuration("fp8"), device)
    capability = (8, 0)
    check_fp8(configuration("mixed"), device)
    with pytest.raises(DependencyError, match=r"needs compute capability 8\.9, but this device has 8\.0") as error:
        check_fp8(configuration("fp8"), device)
    assert error.value.hint == "set precision=mixed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="torchao is not installed") as error:
        check_fp8(configuration("fp8"), device)
    assert "hlatctl[fp8]" in error.value.hint
