"""The weights of a checkpoint, one at a time: blocks, and what is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.of_run import of_run
from hlatctl.run.checkpoint import read_manifest, write_manifest
from hlatctl.run.errors import CheckpointError
from hlatctl.run.paths import RunPaths
from tests.sharded_checkpoint import STEP, TINY, write_run
from trainer.convert.export import export
from trainer.convert.hugging_face import Parts, Weights
from trainer.convert.serve import described, open_weights, take


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return write_run(tmp_path_factory.mktemp("serve") / "run", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def copied(run: RunPaths, tmp_path: Path) -> RunPaths:
    return RunPaths(Path(shutil.copytree(run.root, tmp_path / "run")))


def _open(run: RunPaths, sha256: str | None = None) -> Weights:
    return open_weights(run, STEP, sha256 or read_manifest(run.checkpoint(STEP)).sha256)


def test_each_tensor_and_its_blocks_are_those_of_the_exported_file(run: RunPaths, tmp_path: Path) -> None:
    export(of_run(run), run, STEP, tmp_path / "hf")
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    parts = Parts.of(_open(run))
    assert described(parts) == {
        name: {"dtype": "float32", "shape": list(tensor.shape)} for name, tensor in expected.items()
    }
    for name in sorted(expected, reverse=True):
        assert torch.equal(take(parts, name, []), expected[name])
        block = [[4, 12, None]] + [[None, 7, None]] * (expected[name].ndim - 1)
        assert torch.equal(
            take(parts, name, block), expected[name][4:12, ..., :7] if len(block) > 1 else expected[name][4:12]
        )


def test_a_coalesced_tensor_is_read_once(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, read = _open(run), list[str]()
    whole = weights.read

    def counted(names: list[str]) -> dict[str, torch.Tensor]:
        read.extend(names)
        return whole(names)

    monkeypatch.setattr(weights, "read", counted)
    parts = Parts.of(weights)
    for name in described(parts):
        take(parts, name, [])
    assert sorted(read) == sorted(weights.ours)


def test_a_shard_that_is_cut_off_is_named(copied: RunPaths) -> None:
    shard = min(copied.checkpoint(STEP).glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=f"{shard.parent}: {shard.name}: .* bytes") as caught:
        _open(copied)
    assert "`hlatctl checkpoint ls run`" in caught.value.hint


def test_a_checkpoint_that_was_written_anew_is_refused(copied: RunPaths) -> None:
    folder = copied.checkpoint(STEP)
    verified = read_manifest(folder).sha256
    (folder / "manifest.json").unlink()
    write_manifest(folder, step=STEP, tokens=2000, world={})
    with pytest.raises(CheckpointError, match="was written anew since it was verified"):
        _open(copied, verified)


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(run: RunPaths) -> None:
    config = of_run(run)
    folder = run.checkpoint(STEP)
    wider = replace(config, model=replace(TINY, vocab_size=640))
    with pytest.raises(CheckpointError, match=r"model\.embedding\.weight has shape \(512, 32\), expected \(640, 32\)"):
        Weights(folder, wider)
    deeper = replace(config, model=replace(TINY, num_layers=3))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* is missing"):
        Weights(folder, deeper)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_named(copied: RunPaths) -> None:
    parts = Parts.of(_open(copied))
    shutil.rmtree(copied.checkpoint(STEP))
    with pytest.raises(CheckpointError, match=f"{copied.checkpoint(STEP)}: was removed while it was read"):
        take(parts, "model.norm.weight", [])
