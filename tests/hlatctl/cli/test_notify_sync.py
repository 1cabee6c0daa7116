"""`hlatctl sync` fills mirrors of runs, and `train` refuses mirrors that can't work."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flows.tracking.mirrors import sync
from hlatctl.cli.main import main
from hlatctl.run.journal import read_events
from hlatctl.run.lease import hold
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.mirrors.make import finish, make_run, train


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path))
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("flows.tracking.prefect_flow.begin", lambda *_: None)
    monkeypatch.setattr("flows.tracking.prefect_stale.bring_up_to_date", lambda *_: None)
    return tmp_path


def test_a_run_that_was_trained_without_mirrors_is_copied(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    train(run, 1, 3)
    finish(run)
    assert main(["sync", "one", "--tensorboard"]) == 0
    assert main(["sync", "--tensorboard"]) == 0
    assert capsys.readouterr().out == "one\t5\ttensorboard\none\t0\ttensorboard\n"
    assert run.tensorboard.is_dir()


def test_the_mirrors_of_a_run_are_copied_with_mlflow(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sync.sync
    monkeypatch.setattr(sync, "sync", lambda run, name, say: 0 if name == "mlflow" else real(run, name, say))
    train(make_run(runs_dir, mirrors=["tensorboard"]), 1, 3)
    make_run(runs_dir, "two")
    assert main(["sync"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["one\t0\tmlflow", "one\t5\ttensorboard", "two\t0\tmlflow"]


def test_a_run_that_another_process_copies_is_passed_over(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    with sync.only_copier(run, "tensorboard"):
        assert main(["sync", "--tensorboard"]) == 0
    assert "is copying it to TensorBoard" in capsys.readouterr().err


def test_a_service_without_a_credential_is_refused(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    assert main(["sync", "one", "--wandb"]) == 10
    assert "hint: `export WANDB_API_KEY=KEY`" in capsys.readouterr().err
    assert not run.mirror_cursor("wandb").exists()


def test_training_is_refused_before_a_run_exists(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--dry-run", "tracking=none", "tracking.mirrors=[wandb]"]) == 10
    assert "Weights & Biases needs an API key" in capsys.readouterr().err
    monkeypatch.setattr("conf.tracking.find_spec", lambda _: None)
    assert main(["train", "--dry-run", "tracking=none", "tracking.mirrors=[tensorboard]"]) == 17
    assert "hint: pip install" in capsys.readouterr().err
    assert main(["train", "--dry-run", "tracking=none", "tracking.mirrors=[mlflow]"]) == 10
    assert list(runs_dir.iterdir()) == []


@pytest.mark.processes
def test_a_simulated_run_fills_its_mirror_beside_the_driver(runs_dir: Path) -> None:
    overrides = ["recovery.backoff_s=0", "train.global_batch_size=16", "tracking.final_sync_timeout_s=600"]
    words = ["train", "--dry-run", "--run-id", "dry", "tracking=none", "tracking.mirrors=[tensorboard]", *overrides]
    assert main(words) == 0
    run = RunPaths(runs_dir / "dry")
    logging.getLogger("tensorboard").disabled = True  # it warns of each restart
    reader = EventAccumulator(str(run.tensorboard / "SIMULATED" / "by_step"), size_guidance={"scalars": 0}).Reload()
    last = max(event["step"] for event in read_events(run) if event["kind"] == "step")
    assert [event.step for event in reader.Scalars("train/loss")][-1] == last
    assert not [event for event in read_events(run) if event["kind"] == "tracking_lost"]
    with hold(run.mirror_cursor("tensorboard").with_suffix(".lock"), lambda _: None):
        pass  # the copying process has ended


@pytest.mark.processes
def test_a_service_that_is_away_does_not_disturb_a_run(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "5ec4e7" * 7)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections and never answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        overrides = ["recovery.backoff_s=0", "train.global_batch_size=16", "tracking.final_sync_timeout_s=0"]
        words = ["train", "--dry-run", "--run-id", "dry", "tracking=none", "tracking.mirrors=[wandb]", *overrides]
        assert main(words) == 0
    err = capsys.readouterr().err
    assert "Weights & Biases is not up to date yet; to copy the rest: hlatctl sync dry" in err
    assert "dry: finished" in err
