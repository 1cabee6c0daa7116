"""The real torchtitan trains in real processes, and resumes with the same bits, in its own layout or another."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from conf.schema import ModelConfig
from conf.training_rules import EXIT_CODES
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import node_name
from tests.trainer.conftest import EventsOf, MakeRun, Ranks
from tests.trainer.convert.test_import_model import save
from tests.trainer.s3_server import Server
from trainer.checkpoint import dcp
from trainer.convert.import_model import main as import_model

pytest.importorskip("torchtitan", reason="torchtitan is not installed (docs/engines.md)")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # PyTorch itself, when it is compiled
]

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
    "rope_scaling": "yarn",
}
#: Keys of ``model`` and ``parallel``, for two processes.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": ({"mup_base_width": 16}, _FSDP),
    "tensor parallel": ({"mup_base_width": 16}, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": ({"num_layers": 3}, {"pipeline_parallel_size": 2}),
    "experts of Qwen 3": (_MIXTURE, {**_FSDP, "expert_parallel_size": 2}),
    "experts of DeepSeek-V3": (_DEEPSEEK, {**_FSDP, "expert_parallel_size": 2}),
}
_STEPS, _SAVED = 8, 4
MakeTitan = Callable[..., RunPaths]


@pytest.fixture
def make_titan(tmp_path: Path, make_run: MakeRun) -> MakeTitan:
    """Make a run for two processes, in a folder of its name."""

    def make(name: str, model: dict[str, Any], parallel: dict[str, Any], **changes: Any) -> RunPaths:
        """``changes`` replace groups of keys, except ``train``, which is extended."""
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
def test_a_run_whose_process_is_killed_repeats_the_undisturbed_one_bit_by_bit(
    layout: str, make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    """The other run is checked for corruption, which must change nothing."""
    undisturbed = make_titan("undisturbed", *LAYOUTS[layout])
    run = make_titan("run", *LAYOUTS[layout], recovery={"corruption_check_steps": 3})
    _train(ranks, undisturbed)
    first = events_of(undisturbed, "step")
    assert [event["step"] for event in first] == list(range(1, _STEPS + 1))
    assert first[-1]["loss"] < first[0]["loss"]
    assert ("expert_load" in first[0]) == ("experts" in layout)
    assert checkpoint_steps(undisturbed) == [_SAVED, _STEPS]
    assert not _repeated(undisturbed.checkpoint(_SAVED)), "each process has its own random numbers for its part"

    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    rank, step = draw.randrange(2), draw.randrange(_SAVED + 1, _STEPS)
    print(f"seed {seed}: rank {rank} is killed in step {step}")
    _train(ranks, run, fork=True, kill_rank=rank, kill_step=step)
    _train(ranks, run, attempt=2)

    assert [event["step"] for event in events_of(run, "corruption_checked", 2)] == [_SAVED, 6, _STEPS]
    (started,) = events_of(run, "train_started", 2)
    assert started["resumed_from_step"] == _SAVED
    names = ("step", "loss", "grad_norm", "lr", "tokens", "batch")
    expected, before = _steps(undisturbed, events_of, 1, *names), _steps(run, events_of, 1, *names)
    assert before == expected[: len(before)]
    assert len(before) in (step - 1, step), "the other process may have ended the step"
    assert _steps(run, events_of, 2, *names) == expected[_SAVED:]


def test_a_process_whose_layer_computes_wrong_numbers_is_named_by_the_next_check(
    make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    run = make_titan("run", {}, _FSDP, recovery={"corruption_check_steps": 3})
    _train(ranks, run, wrong_rank=1, wrong_step=4)
    assert [event["step"] for event in events_of(run, "corruption_checked")] == [0, 3]
    (found,) = events_of(run, "corruption_suspected")
    assert (found["step"], found["part"], found["ranks"]) == (6, "forward", [1])
    assert found["blamed_hosts"] == [node_name()]
    assert checkpoint_steps(run) == [_SAVED]


def test_weights_gathered_in_fp8_give_nearly_the_losses_of_those_gathered_in_bf16(
    make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    """A CPU emulates both with one scale for each tensor."""
    plain = make_titan("plain", {}, _FSDP, precision={"name": "fp8"})
    gathered = make_titan("gathered", {}, _FSDP, precision={"name": "fp8", "fp8_scaling": "tensorwise"})
    for run in (plain, gathered):
        _train(ranks, run)
    losses = [[loss for (loss,) in _steps(run, events_of, 1, "loss")] for run in (plain, gathered)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] != losses[0]

    shutil.rmtree(gathered.checkpoint(_STEPS))
    _train(ranks, gathered, attempt=2)
    assert _steps(gathered, events_of, 2, "loss") == _steps(gathered, events_of, 1, "loss")[_SAVED:]


def _repeated(checkpoint: Path) -> list[str]:
    """Return the matrices of which one half is nearly the other."""
    metadata = dcp.read_metadata(checkpoint)
    weights: dict[str, Any] = {
        name: torch.empty(stored.size)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and len(stored.size) > 1 and not name.startswith("optimizer")
    }
    dcp.load(weights, checkpoint, metadata=metadata)

    def alike(tensor: torch.Tensor, dim: int) -> bool:
        halves = torch.stack([half.flatten() for half in tensor.chunk(2, dim)])
        return float(torch.corrcoef(halves)[0, 1]) > 0.9

    assert weights
    return [name for name, tensor in weights.items() if alike(tensor, 0) or alike(tensor, 1)]


def _steps(run: RunPaths, events_of: EventsOf, attempt: int, *names: str) -> list[list[Any]]:
    return [[event[name] for name in names] for event in events_of(run, "step", attempt)]


def test_with_fsdp_the_process_with_the_slow_product_is_reported(
    make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    run = make_titan("run", {}, _FSDP, train={"tokens": 20 * 4 * 32}, recovery={"straggler_steps": 20})
    _train(ranks, run, product=True, slow_s=0.1)
    (times,) = events_of(run, "rank_times")
    assert (times["step"], times["what"], times["slowest_rank"]) == (20, "product", 1)
    (straggler,) = events_of(run, "straggler")
    assert straggler["rank"] == 1


def test_one_process_continues_the_batches_of_two_from_the_copy_in_object_storage(
    tmp_path: Path, s3_server: Server, make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    fast, environment = tmp_path / "nvme", s3_server.environment()
    stored = {"every_steps": _SAVED, "fast_dir": os.fspath(fast), "remote_url": "s3://bucket/runs"}
    run = make_titan("run", _MIXTURE, _FSDP, checkpoint=stored)
    _train(ranks, run, env=environment, fork=True, kill_rank=1, kill_step=_STEPS - 1)
    first = events_of(run, "step", 1)[_SAVED:]
    assert first
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(fast)
    change = {"cluster": {"processes_per_node": 1}, "train": {"micro_batch_size": 2}}
    alone = make_titan("run", _MIXTURE, {}, checkpoint=stored, **change)

    _train(ranks, alone, attempt=2, processes=1, env=environment)

    assert [event["step"] for event in events_of(alone, "checkpoint_fetched", 2)] == [_SAVED]
    again = events_of(alone, "step", 2)[: len(first)]
    assert [event["batch"] for event in again] == [event["batch"] for event in first]
    for ours, theirs in zip(again, first, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_a_stop_of_one_process_ends_all_with_a_checkpoint(
    make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    run = make_titan("run", {}, _FSDP)
    _train(ranks, run, stop_rank=1, code=EXIT_CODES["stop"])
    assert [event["reason"] for event in events_of(run, "checkpoint_written")] == ["stop"]
    (stopped,) = events_of(run, "train_stopped")
    assert checkpoint_steps(run) == [stopped["step"]] == [2], "the processes agree while they train the next step"

    _train(ranks, run, attempt=2)
    assert [event["step"] for event in events_of(run, "step", 2)] == list(range(3, _STEPS + 1))


def test_sparse_logs_give_the_same_numbers_of_fewer_steps(
    make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    often, seldom = (
        make_titan("often", {}, _FSDP),
        make_titan("seldom", {}, _FSDP, backend={"name": "torchtitan", "torchtitan": {"metrics.log_freq": 3}}),
    )
    for run in (often, seldom):
        _train(ranks, run)
    every = {row[0]: row for row in _steps(often, events_of, 1, "step", "loss", "tokens", "lr")}
    some = _steps(seldom, events_of, 1, "step", "loss", "tokens", "lr")
    assert [row[0] for row in some] == [1, 3, _SAVED, 6, _STEPS], "and before each checkpoint"
    assert some == [every[row[0]] for row in some]


@pytest.mark.parametrize("model", [{"mup_base_width": 8}, {"qk_norm": "head"}], ids=["llama with muP", "qwen3"])
def test_from_equal_weights_both_engines_have_equal_losses(
    model: dict[str, Any], tmp_path: Path, make_titan: MakeTitan, ranks: Ranks, events_of: EventsOf
) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
    }
    source = save(tmp_path / "source", ModelConfig(**{**shape, "num_kv_heads": 2, **model}))
    runs = []
    for engine in ("torch_native", "torchtitan"):
        target = tmp_path / f"weights-{engine}"
        command = ["--from", os.fspath(source), "--to", os.fspath(target), "--backend", engine]
        assert import_model(command) == 0
        train = {"tokens": 20 * 4 * 32, "init_from": os.fspath(target)}
        rates = {"lr": 3e-3, "warmup_steps": 5, "max_grad_norm": 0.5}
        runs.append(make_titan(engine, model, _FSDP, train=train, backend={"name": engine}, optimizer=rates))
        _train(ranks, runs[-1])

    ours, theirs = (_steps(run, events_of, 1, "loss", "grad_norm", "lr") for run in runs)
    assert len(ours) == 20
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
