"""Recomputation: equal gradients, and less memory between forward and backward pass."""

from __future__ import annotations

import dataclasses
import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from conf.devices import DEVICES
from conf.schema import BackendConfig, Config, ModelConfig, ParallelConfig, TrainConfig
from trainer.backends import make_backend

_MODEL = ModelConfig(vocab_size=128, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2)


@dataclass(frozen=True)
class Passes:
    """What one forward and backward pass gave."""

    kept_bytes: int
    gradients: dict[str, torch.Tensor]


def passes(trace: Path, *, compiles: bool, **parallel: Any) -> Passes:
    """Run both passes; memory is from PyTorch's record of allocations during the forward pass."""
    torch._dynamo.reset()  # a graph in memory was built for another budget
    config = Config(
        model=_MODEL,
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(global_batch_size=4, micro_batch_size=4, seq_len=128),
        backend=BackendConfig(compile=compiles),
    )
    model = make_backend(config).build_model(document_end_id=None)
    tokens = torch.arange(4 * 128).reshape(4, 128) * 7 % 128
    if compiles:
        model(tokens)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        output = model(tokens)
    recorded.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    first, last = events[0]["args"], events[-1]["args"]
    kept = int(last["Total Allocated"]) - (int(first["Total Allocated"]) - int(first["Bytes"]))
    output.square().sum().backward()
    return Passes(kept, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def assert_same_gradients(ours: Passes, expected: Passes) -> None:
    assert ours.gradients.keys() == expected.gradients.keys()
    assert len(ours.gradients) == 14
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=2e-5, atol=2e-5 * float(gradient.abs().max()))


def test_recomputation_by_operator_keeps_more_than_the_inputs_of_layers_and_less_than_everything(
    tmp_path: Path,
) -> None:
    everything = passes(tmp_path / "trace", compiles=False)
    ours = passes(tmp_path / "trace", compiles=False, activation_checkpointing="operators")
    inputs = passes(tmp_path / "trace", compiles=False, activation_checkpointing="full")
    assert 2 * inputs.kept_bytes < ours.kept_bytes < 0.6 * everything.kept_bytes
    # Per token and layer: the input, qkv, attention with one number per head, and gate with up.
    entries = 64 + 2 * 64 + (64 + 4) + 2 * 176
    assert ours.kept_bytes - inputs.kept_bytes == 4 * (4 * 128) * 2 * (entries - 64)
    assert_same_gradients(ours, everything)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:.torch.jit:DeprecationWarning")
def test_compiled_layers_keep_what_the_budget_or_the_list_of_operators_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Inductor's division into forward and backward graph, but without its kernels, which take long to build."""
    without_kernels = dataclasses.replace(DEVICES["cpu"], compile_backend="aot_eager_decomp_partition")
    monkeypatch.setitem(DEVICES, "cpu", without_kernels)
    everything = passes(tmp_path / "trace", compiles=True)
    kept = [everything.kept_bytes]
    for budget in (0.5, 0.0):
        ours = passes(
            tmp_path / "trace", compiles=True, activation_checkpointing="budget", activation_memory_budget=budget
        )
        assert_same_gradients(ours, everything)
        kept.append(ours.kept_bytes)
    assert kept[0] > kept[1] > kept[2]
    operators = passes(tmp_path / "trace", compiles=True, activation_checkpointing="operators")
    assert_same_gradients(operators, everything)
    assert kept[2] < operators.kept_bytes < kept[0]
