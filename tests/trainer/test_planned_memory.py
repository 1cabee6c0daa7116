"""Planned memory, compared with what the allocator gives out while a model trains."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from conf.schema import (
    BackendConfig,
    CheckpointConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    PrecisionName,
    TrainConfig,
)
from hlatctl.plan.memory import memory
from trainer.backends import make_backend

_MODEL = ModelConfig(vocab_size=4096, hidden_size=256, intermediate_size=704, num_layers=6, num_heads=4, num_kv_heads=4)
_GROUPED = ModelConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=704, num_layers=8, num_heads=8, num_kv_heads=2
)


def configuration(model: ModelConfig, precision: PrecisionName, checkpointing: Any, batch: int, micro: int) -> Config:
    return Config(
        model=model,
        precision=PrecisionConfig(name=precision),
        parallel=ParallelConfig(activation_checkpointing=checkpointing),
        train=TrainConfig(global_batch_size=batch, micro_batch_size=micro, seq_len=256),
        checkpoint=CheckpointConfig(mode="sync"),
        backend=BackendConfig(compile=False),
    )


def peak_bytes(config: Config, trace: Path) -> int:
    """Return the peak of two optimizer steps, from PyTorch's record of allocations."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        backend = make_backend(config)
        model = backend.build_model(document_end_id=None)
        optimizer = backend.optimizer(model)
        tokens = torch.randint(config.model.vocab_size, (config.train.global_batch_size, config.train.seq_len))
        for step in range(1, 3):
            optimizer.zero_grad()
            loss = backend.forward_backward(model, tokens, tokens)
            backend.update(optimizer, loss, lr=1e-3, step=step)
    recorded.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    allocated = [int(event["args"]["Total Allocated"]) for event in events]
    return max(allocated) - (allocated[0] - int(events[0]["args"]["Bytes"]))


@pytest.mark.parametrize(
    ("model", "precision", "checkpointing", "batch", "micro"),
    [(_MODEL, "fp32", "none", 2, 2), (_MODEL, "mixed", "full", 2, 2), (_GROUPED, "bf16_sr", "selective", 4, 2)],
)
def test_planned_memory_is_within_15_percent_of_the_measured(
    tmp_path: Path, model: ModelConfig, precision: PrecisionName, checkpointing: Any, batch: int, micro: int
) -> None:
    config = configuration(model, precision, checkpointing, batch, micro)
    measured, planned = peak_bytes(config, tmp_path / "trace.json"), memory(config).need_bytes
    state = sum(part.value_bytes for part in memory(config).parts[:3])
    assert measured > state * 1.15, "activations count"
    assert planned == pytest.approx(measured, rel=0.15)
    print(f"{precision} {checkpointing}: planned {planned:,}, measured {measured:,} ({planned / measured - 1:+.1%})")
