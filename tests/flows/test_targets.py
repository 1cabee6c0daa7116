"""Resolving TARGET, and each way in which that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import targets
from flows.targets import FolderTarget, RunTarget
from hlatctl.run import runs
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import CheckpointError, ConfigError, EvaluationError, HlatctlError, RunNotFoundError
from hlatctl.run.paths import RunPaths


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(runs_dir: Path) -> RunPaths:
    return runs.create_run(runs_dir, "first-1", "x: 1\n")


def _checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "shard.bin").write_text("weights", encoding="utf-8")
    write_manifest(path, step=step, tokens=step * 512, world={})
    return path


def _model(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["first-1", "first", "latest"])
def test_a_run_is_named_by_id_beginning_or_latest(run: RunPaths, runs_dir: Path, name: str) -> None:
    assert targets.find(name, runs_dir) == RunTarget(run)


def test_a_run_a_checkpoint_and_a_model_are_named_by_their_folders(
    run: RunPaths, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert targets.find(str(run.root), runs_dir) == RunTarget(run)
    assert targets.find(str(_checkpoint(run.checkpoints, 7)), runs_dir) == RunTarget(run, 7, 3584)
    model = _model(tmp_path / "model", "config.json", "tokenizer_config.json", "model.safetensors")
    assert targets.find(str(model), runs_dir) == FolderTarget(model)
    monkeypatch.chdir(tmp_path)
    assert targets.find("model", runs_dir) == FolderTarget(model)


def test_an_error_says_why_something_is_no_target(run: RunPaths, runs_dir: Path, tmp_path: Path) -> None:
    cut = _checkpoint(run.checkpoints, 7)
    (cut / "manifest.json").unlink()
    torn = _checkpoint(run.checkpoints, 8)
    (torn / "shard.bin").write_text("w", encoding="utf-8")
    imported = _checkpoint(tmp_path / "imported", 0)
    pickled = _model(tmp_path / "pickled", "config.json", "tokenizer_config.json", "pytorch_model.bin")
    bare = _model(tmp_path / "bare", "config.json", "model.safetensors")
    empty = _model(tmp_path / "empty")
    wrong: dict[str, tuple[type[HlatctlError], str]] = {
        "frist-1": (RunNotFoundError, "frist-1: no run of that name in .*\nhint: did you mean first-1"),
        "./nothing": (RunNotFoundError, r"TARGET=\./nothing: no such folder"),
        str(run.config): (EvaluationError, "is a file"),
        str(cut): (CheckpointError, "no manifest.json, so the checkpoint was never completed"),
        str(torn): (CheckpointError, "shard.bin: 1 bytes, expected 7"),
        str(run.checkpoints): (
            EvaluationError,
            "contains checkpoints but isn't one\nhint: name one of them: .*step-00000008",
        ),
        str(imported): (EvaluationError, "is a checkpoint outside of a run"),
        str(pickled): (EvaluationError, "it has no safetensors weights; .* pickles, which are never opened"),
        str(bare): (EvaluationError, "is no Hugging Face model, it has no tokenizer_config.json"),
        str(empty): (EvaluationError, "is neither a run .*, nor a checkpoint .*, nor a Hugging Face model"),
    }
    for name, (kind, words) in wrong.items():
        with pytest.raises(kind, match=words):
            targets.find(name, runs_dir)


def test_a_milestone_is_chosen_of_a_whole_run_only(run: RunPaths, tmp_path: Path) -> None:
    targets.refuse_at(RunTarget(run), 1000)
    targets.refuse_at(FolderTarget(tmp_path), None)
    for single in (FolderTarget(tmp_path), RunTarget(run, 7, 3584)):
        with pytest.raises(ConfigError, match="--at=1000: chooses a milestone of a run, but TARGET is a single model"):
            targets.refuse_at(single, 1000)
