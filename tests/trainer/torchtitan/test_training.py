"""The real torchtitan trains in real processes, and resumes with the same bits, in its own layout or another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, Ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed (docs/engines.md)")
pytestmark = pytest.mark.processes

_FSDP = {"data_parallel": "fsdp"}
_QWEN3 = {"qk_norm": "head", "head_dim": 8}
_MIXTURE = {**_QWEN3, "num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 16}
_DEEPSEEK = {
    "num_kv_heads": 4,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_intermediate_size": 16,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
#: Keys of ``model`` and ``parallel``, for two processes.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": ({}, _FSDP),
    "tensor parallel": ({}, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": ({}, {"pipeline_parallel_size": 2}),
    "experts of Qwen 3": (_MIXTURE, {**_FSDP, "expert_parallel_size": 2}),
    "experts of DeepSeek-V3": (_DEEPSEEK, {**_FSDP, "expert_parallel_size": 2}),
}
_STEPS, _SAVED = 6, 4
MakeTitan = Callable[..., RunPaths]


@pytest.fixture
def make_titan(tmp_path: Path, make_run: MakeRun) -> MakeTitan:
    """Make a run for two processes, in a folder of its name."""

    def make(name: str, model: dict[str, Any], parallel: dict[str, Any], **changes: Any) -> RunPaths:
        train = {"tokens": _STEPS * 4 * 32, "micro_batch_size": 1, **changes.pop("train", {})}
        settings = {
            "model": model,
            "parallel": parallel,
            "train": train,
            "backend": {"name": "torchtitan"},
            "checkpoint": {"every_steps": _SAVED},
            "cluster": {"processes_per_node": 2},
        }
        return make_run(tmp_path / name, **{**settings, **changes})

    return make


def _train(ranks: Ranks, run: RunPaths, attempt: int = 1, processes: int = 2, **job: Any) -> None:
    ranks(processes, [{"work": "train", "run": os.fspath(run.root), "attempt": attempt, **job}])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_repeats_every_step_bit_by_bit(
    layout: str, make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    run = make_titan("run", *LAYOUTS[layout])
    _train(ranks, run)
    first = events_of(run, "step", 1)
    assert [event["step"] for event in first] == list(range(1, _STEPS + 1))
    assert first[-1]["loss"] < first[0]["loss"]
    assert ("expert_load" in first[0]) == ("experts" in layout)
    assert checkpoint_steps(run) == [_SAVED, _STEPS]
    shutil.rmtree(run.checkpoint(_STEPS))

    _train(ranks, run, attempt=2)

    (started,) = events_of(run, "train_started", 2)
    assert started["resumed_from_step"] == _SAVED
    names = ("step", "loss", "grad_norm", "lr", "tokens", "batch")
    assert [[event[name] for name in names] for event in events_of(run, "step", 2)] == [
        [event[name] for name in names] for event in first[_SAVED:]
    ]
