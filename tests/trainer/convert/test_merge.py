"""Checkpoints of one model are averaged; others are refused before anything is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.load import load
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest
from hlatctl.run.errors import CheckpointError, ConfigError, StorageError
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import TrainRun
from trainer.convert.export import export
from trainer.convert.merge import MERGED_FROM, main


def merge(target: Path, *sources: tuple[RunPaths, str, str], more: tuple[str, ...] = ()) -> int:
    named = [word for run, step, weight in sources for word in ("--source", os.fspath(run.root), step, weight)]
    return main([*named, "--to", os.fspath(target), *more])


def test_weights_are_the_weighted_mean_of_those_exported_one_by_one(
    trained: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = {}
    for step in (8, 16, 24):
        export(load(trained.config), trained, step, tmp_path / str(step))
        single[step] = load_file(tmp_path / str(step) / "model.safetensors")
    assert merge(tmp_path / "mean", (trained, "8", "1"), (trained, "16", "1"), (trained, "newest", "2")) == 0
    written = json.loads(capsys.readouterr().out)
    merged = load_file(tmp_path / "mean" / "model.safetensors")
    assert merged.keys() == single[8].keys()
    for name, tensor in merged.items():
        expected = (single[8][name].double() + single[16][name].double() + 2 * single[24][name].double()) / 4
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
    assert not torch.equal(merged["lm_head.weight"], single[24]["lm_head.weight"])
    exported, mean = (files.read_json(tmp_path / name / "config.json") for name in ("24", "mean"))
    assert exported == mean

    provenance = files.read_sealed_json(tmp_path / "mean" / MERGED_FROM)["sources"]
    assert [(each["step"], each["share"]) for each in provenance] == [(8, 0.25), (16, 0.25), (24, 0.5)]
    assert provenance[0] == {
        "run": trained.run_id,
        "step": 8,
        "tokens": 8 * 4 * 32,
        "manifest_sha256": read_manifest(trained.checkpoint(8)).sha256,
        "share": 0.25,
    }
    assert written["sources"] == provenance


def test_mean_is_written_in_another_number_format(trained: RunPaths, tmp_path: Path) -> None:
    merge(tmp_path / "hf", (trained, "8", "1"), (trained, "24", "3"), more=("--dtype", "bfloat16"))
    assert {tensor.dtype for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}


def test_checkpoint_of_another_model_is_refused(trained: RunPaths, train_run: TrainRun, tmp_path: Path) -> None:
    wider = train_run(model={"intermediate_size": 128}, train={"max_steps": 1})
    with pytest.raises(CheckpointError, match=r"only checkpoints of one model can be merged"):
        merge(tmp_path / "hf", (trained, "24", "1"), (wider, "newest", "1"))
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("second", "more", "message"),
    [
        (("24", "1"), (), "is named twice"),
        (("16", "inf"), (), r"--weights=1,inf: must be finite"),
        (("16", "-1"), (), r"--weights=1,-1: must be finite, and their sum not 0"),
    ],
)
def test_what_makes_no_mean_is_refused(
    second: tuple[str, str], more: tuple[str, ...], message: str, trained: RunPaths, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        merge(tmp_path / "hf", (trained, "24", "1"), (trained, *second), more=more)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_not_changed(trained: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(StorageError, match="exists and is not an empty folder"):
        merge(tmp_path, (trained, "8", "1"), (trained, "24", "1"))
