"""The loop's own decisions: what ends a run, and what is journalled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import files
from hlatctl.run.errors import DataError, TrainingError
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths

MakeRun = Callable[..., RunPaths]
TrainHere = Callable[[RunPaths, int], int]
EventsOf = Callable[..., list[dict[str, Any]]]


def test_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "nan", optimizer={"lr": 1e30, "warmup_steps": 0})
    with pytest.raises(TrainingError, match=r"step \d+: loss=.*: not finite") as caught:
        train_here(run, 1)
    assert "lower optimizer.lr" in caught.value.hint
    assert not events_of(run, "train_stopped")


def test_accumulated_micro_batches_train_like_one_batch(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    losses = []
    for micro_batch_size in (4, 1):
        run = make_run(tmp_path / f"micro-{micro_batch_size}", train={"micro_batch_size": micro_batch_size})
        assert train_here(run, 1) == 0
        losses.append([event["loss"] for event in events_of(run, "step")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_missing_compiler_is_told_and_training_runs_uncompiled(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-installed")
    run = make_run(tmp_path / "uncompiled", backend={"compile": True})
    assert train_here(run, 1) == 0
    (warning,) = events_of(run, "warning")
    assert warning["message"].startswith("no C++ compiler (g++ or $CXX) found: training runs uncompiled")
    assert f"warning: {warning['message']}" in capsys.readouterr().err
    assert not events_of(run, "compile_cache")


def test_spikes_are_journalled_with_the_mean_they_exceed(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.monitor.THRESHOLD", -1e9)
    run = make_run(tmp_path / "spikes")
    assert train_here(run, 1) == 0
    norms = [event["grad_norm"] for event in events_of(run, "step")]
    spikes = events_of(run, "gradient_spike")
    assert [event["step"] for event in spikes] == [21, 22, 23, 24]
    assert spikes[0]["mean"] == pytest.approx(sum(norms[:20]) / 20)


def test_finished_run_has_nothing_left_to_do(tmp_path: Path, make_run: MakeRun, train_here: TrainHere) -> None:
    run = make_run(tmp_path / "done")
    assert train_here(run, 1) == 0
    assert train_here(run, 2) == 0
    kinds = [event["kind"] for event in read_events(run) if event["attempt"] == 2]
    assert kinds == ["checkpoint_verified", "train_started", "train_stopped"]


def test_empty_corpus_is_an_error(tmp_path: Path, make_run: MakeRun, train_here: TrainHere) -> None:
    run = make_run(tmp_path / "empty")
    dataset = files.read_json(run.dataset)
    files.write_json(run.dataset, {**dataset, "files": []})
    with pytest.raises(DataError, match="the prepared corpus has no training documents"):
        train_here(run, 1)
