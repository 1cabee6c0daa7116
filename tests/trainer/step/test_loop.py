"""The loop: what ends a run, and what is journalled."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hlatctl.run import files
from hlatctl.run.checkpoint import batches_drawn, read_rank_states
from hlatctl.run.errors import NONFINITE, DataError, TrainingError
from hlatctl.run.journal import read_events
from hlatctl.run.step_metrics import others
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere, TrainRun
from trainer.backends.base import StepMetrics
from trainer.backends.torch_native import TorchNative
from trainer.model.decoder import Layer, Llama, StepNumbers


def test_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "nan", optimizer={"lr": 1e30, "warmup_steps": 0})
    with pytest.raises(TrainingError, match=r"step \d+: loss=.*: not finite") as caught:
        train_here(run, 1)
    assert "lower optimizer.lr" in caught.value.hint
    assert caught.value.code == NONFINITE
    assert not events_of(run, "train_stopped")


def test_accumulated_micro_batches_train_like_one_batch(train_run: TrainRun, events_of: EventsOf) -> None:
    losses = []
    for micro_batch_size in (4, 1):
        run = train_run(train={"micro_batch_size": micro_batch_size})
        losses.append([event["loss"] for event in events_of(run, "step")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    step = events_of(run, "step")[-1]
    assert step["mfu"] is None, "a CPU's peak is unknown"
    assert step["tokens_per_s_per_device"] == step["tokens_per_s"] > 0
    assert 0 < step["memory_bytes"] <= step["peak_memory_bytes"]


def test_garbage_is_collected_in_the_same_steps_on_every_process_and_quickly(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first steps left, such as PyTorch's own objects, is not walked through again."""
    collected: list[int] = []
    walked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(steps[-1])
            walked.append(len(gc.get_objects()))

    class Noting(TorchNative):
        def update(self, *arguments: Any, step: int, **options: Any) -> Callable[[], StepMetrics]:
            steps.append(step)
            return super().update(*arguments, step=step, **options)

    steps = [0]
    monkeypatch.setattr("trainer.step.loop._COLLECT_EVERY_STEPS", 3)
    monkeypatch.setattr("trainer.backends.torch_native.TorchNative", Noting)
    gc.callbacks.append(note)
    try:
        train_run(train={"max_steps": 7})
    finally:
        gc.callbacks.remove(note)
    assert [step for step in collected if 0 < step < 7] == [3, 6]
    assert max(walked[collected.index(3)], walked[collected.index(6)]) < 20_000
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_number_that_a_layer_or_a_backend_adds_is_journalled_with_its_step(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(Layer):
        def _layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
            out = super()._layer(x, cos, sin, mask)
            self.parts.numbers.add("router_entropy", out.new_tensor(float(self is not first[0])))
            return out

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            first.append(self)

    class Counting(TorchNative):
        def forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
            model.parts.numbers.add("largest_id", inputs.max())
            return super().forward_backward(model, inputs, targets)

    first: list[Layer] = []
    monkeypatch.setattr("trainer.model.decoder.Layer", Noisy)
    monkeypatch.setattr("trainer.backends.torch_native.TorchNative", Counting)
    run = train_run(train={"max_steps": 2, "micro_batch_size": 1})
    steps = events_of(run, "step")
    assert [step["router_entropy"] for step in steps] == [0.5, 0.5], "the mean of two layers and four micro-batches"
    assert all(1 < step["largest_id"] < 512 for step in steps)
    assert others(steps[0]) == ["largest_id", "router_entropy"], "they need no row to be kept"


def test_numbers_are_means_over_the_processes_that_add_them() -> None:
    first, second, rest = StepNumbers(), StepNumbers(), StepNumbers()
    for step in range(2):
        first.add("router_entropy", torch.tensor([1.0]))
        first.add("router_entropy", torch.tensor(3.0))
        second.add("router_entropy", torch.tensor(2.0 + 3 * step))
        if not step:
            second.add("only_once", torch.tensor(float("inf")))
        taken = [
            numbers.take(lambda mine: [["router_entropy"], ["only_once", "router_entropy"], mine], torch.zeros(()))
            for numbers in (first, second, rest)
        ]
        names, _ = taken[0]
        assert [each for each, _ in taken] == [["only_once", "router_entropy"]] * 3
        sums = [1.0, 0.0, 4.0, 9.0, *torch.stack([values for _, values in taken]).sum(0).tolist()]
        metrics = StepMetrics.of(sums, names)
        assert metrics.others == {"router_entropy": 2.0 + step}, "neither infinite nor unknown values"
        assert (metrics.grad_norm, metrics.param_norm) == (2.0, 3.0)


def test_a_compiled_layer_adds_as_many_values_as_there_are_layers_and_micro_batches() -> None:
    numbers = StepNumbers()

    def layer(x: Tensor) -> Tensor:
        numbers.add("router_entropy", x.mean())
        return 2 * x

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    for value in range(12):
        compiled(torch.full((4,), float(value)))
    names, values = numbers.take(lambda mine: [mine], torch.zeros(()))
    assert (names, values.tolist()) == (["router_entropy"], [66.0, 12.0])


def test_every_process_begins_with_the_random_state_of_the_seed(train_run: TrainRun) -> None:
    run = train_run(train={"max_steps": 1}, seed=7)
    expected = bytes(torch.Generator().manual_seed(7).get_state().numpy()).hex()
    assert read_rank_states(run.checkpoint(1)).rng == [{"torch": expected}]


def test_missing_compiler_is_a_warning_and_training_runs_uncompiled(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-installed")
    run = train_run(backend={"compile": True})
    (warning,) = events_of(run, "warning")
    assert warning["message"].startswith("no C++ compiler (g++ or $CXX) found: training runs uncompiled")
    assert f"warning: {warning['message']}" in capsys.readouterr().err
    assert not events_of(run, "compile_cache")


def test_spikes_are_journalled_with_the_mean_they_exceed(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.step.monitor.THRESHOLD", -1e9)
    run = train_run()
    norms = [event["grad_norm"] for event in events_of(run, "step")]
    (spike,) = events_of(run, "gradient_spike")
    assert spike["step"] == 21
    assert spike["mean"] == pytest.approx(sum(norms[:20]) / 20)


@pytest.fixture
def poisoned_at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the loss of the n-th batch of this process NaN, every time it is used."""

    def poison(step: int, factor: float = math.nan) -> None:
        seen: list[bytes] = []
        honest = TorchNative._loss

        def loss(self: TorchNative, model: Llama, hidden: Tensor, targets: Tensor) -> Tensor:
            key = targets.numpy().tobytes()
            if key not in seen:
                seen.append(key)
            return honest(self, model, hidden, targets) * (factor if seen.index(key) == step - 1 else 1.0)

        monkeypatch.setattr(TorchNative, "_loss", loss)

    return poison


def test_update_that_is_not_finite_is_skipped_with_on_nonfinite_skip(
    train_run: TrainRun, events_of: EventsOf, poisoned_at_step: Callable[[int], None]
) -> None:
    poisoned_at_step(11)
    run = train_run(train={"on_nonfinite": "skip"})
    steps = events_of(run, "step")
    assert [event["step"] for event in steps] == [step for step in range(1, 25) if step != 11]
    (nonfinite,) = events_of(run, "nonfinite")
    assert (nonfinite["step"], nonfinite["batch"]) == (11, 11)
    assert (nonfinite["loss"], nonfinite["action"]) == ("nan", "skip")
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_a_host_that_runs_ahead_of_the_device_trains_the_same_bits(
    precision: str,
    train_run: TrainRun,
    events_of: EventsOf,
    poisoned_at_step: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after an update that the device has skipped before the host knows it."""
    steps = []
    for ahead in (0, 1):
        poisoned_at_step(5)
        monkeypatch.setattr(TorchNative, "steps_ahead", ahead)
        run = train_run(train={"on_nonfinite": "skip", "max_steps": 9}, precision={"name": precision})
        steps.append([[event[key] for key in ("step", "loss", "grad_norm")] for event in events_of(run, "step")])
        assert files.read_json(run.checkpoint(9) / "state.json")["optimizer_steps"] == 8
        monkeypatch.undo()
    assert steps[0] == steps[1]
    assert [row[0] for row in steps[0]] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_the_update_of_a_bad_batch_is_skipped_with_on_spike_skip(
    train_run: TrainRun, events_of: EventsOf, poisoned_at_step: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for action in ("keep", "skip"):
        poisoned_at_step(70, factor=1000.0)
        runs.append(train_run(train={"on_spike": action, "tokens": 72 * 128}))
        monkeypatch.undo()
    kept, skipped = ([event["loss"] for event in events_of(run, "step")] for run in runs)
    assert kept[:70] == skipped[:70]
    assert kept[70] != skipped[70]
    assert [files.read_json(run.checkpoint(72) / "state.json")["optimizer_steps"] for run in runs] == [72, 71]
    assert [event["step"] for event in events_of(runs[1], "alarm") if event["what"] == "update_skipped"] == [70]


def test_too_many_skipped_updates_end_the_run(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"lr": 1e30, "warmup_steps": 0},
        "train": {"on_nonfinite": "skip", "max_nonfinite_steps": 2},
    }
    run = make_run(tmp_path / "skip", **changes)
    with pytest.raises(TrainingError, match="not finite"):
        train_here(run, 1)
    assert [event["action"] for event in events_of(run, "nonfinite")] == ["skip", "skip", "stop"]


@pytest.mark.parametrize(("steps_ahead", "poisoned"), [(0, 11), (1, 11), (1, 16)])
def test_rollback_continues_from_the_previous_checkpoint_without_the_batch(
    steps_ahead: int,
    poisoned: int,
    tmp_path: Path,
    make_run: MakeRun,
    train_here: TrainHere,
    events_of: EventsOf,
    poisoned_at_step: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchNative, "steps_ahead", steps_ahead)  # as a device does that executes lazily
    poisoned_at_step(poisoned)
    run = make_run(tmp_path / "rollback", train={"on_nonfinite": "rollback"})
    assert train_here(run, 1) == 76
    assert events_of(run, "train_stopped")[-1]["reason"] == "rollback"
    (changed,) = events_of(run, "data_changed")
    assert (changed["key"], changed["value"]) == ("data.skip_steps", [poisoned])
    assert [event["step"] for event in events_of(run, "step")] == list(range(1, poisoned))
    assert max(event["step"] for event in events_of(run, "checkpoint_written")) == 8

    assert train_here(run, 2) == 0
    again = events_of(run, "step", 2)
    assert [event["step"] for event in again] == list(range(9, 25))
    assert [event["batch"] for event in again] == [batch for batch in range(9, 26) if batch != poisoned]
    rows = files.read_json(run.checkpoint(24) / "ranks.json")["loader"]
    assert rows[0][0] == batches_drawn(run, 24, read_events(run)) == 25


def test_finished_run_has_nothing_left_to_do(train_run: TrainRun, train_here: TrainHere) -> None:
    run = train_run()
    assert train_here(run, 2) == 0
    kinds = [event["kind"] for event in read_events(run) if event["attempt"] == 2]
    assert kinds == ["checkpoint_verified", "train_started", "train_stopped"]


def test_corpus_without_its_files_is_an_error(tmp_path: Path, make_run: MakeRun, train_here: TrainHere) -> None:
    run = make_run(tmp_path / "empty")
    dataset = files.read_sealed_json(run.dataset)
    files.write_sealed_json(run.dataset, {**dataset, "files": []})
    with pytest.raises(DataError, match=r"dataset\.json names 0 prepared files, its index 1"):
        train_here(run, 1)
