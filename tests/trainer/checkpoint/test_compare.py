"""Two checkpoints are compared by tensors, bit by bit, whatever layout wrote them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from tests.dcp_checkpoint import write_dcp
from trainer.checkpoint.compare import compare, main
from trainer.checkpoint.shards import INDEX, compose, save_tensors


def a_checkpoint(folder: Path, *shards: dict[str, Tensor]) -> Path:
    """Write a checkpoint with one shard for each process."""
    folder.mkdir()
    written = [save_tensors(tensors, folder, number=number) for number, tensors in enumerate(shards, start=1)]
    index = compose({shard.entry["path"]: shard.chunks for shard in written if shard})
    files.write_text(folder / INDEX, index.text)
    write_manifest(folder, step=1, tokens=1, world={})
    return folder


def tensors() -> dict[str, Tensor]:
    return {"model.a": torch.tensor([3.0, 4.0]), "model.b": torch.ones(2, 3), "optimizer.exp_avg.b": torch.zeros(2, 3)}


def test_equal_checkpoints_are_equal_also_if_other_files_hold_their_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tensors(), tensors()
    folder = a_checkpoint(tmp_path / "one", one)
    assert compare(folder, a_checkpoint(tmp_path / "same", two)).equal == 3
    other = a_checkpoint(tmp_path / "other", {"model.a": two.pop("model.a")}, two)
    assert main([str(folder), str(other)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"tensors": 3, "equal": 3, "first_different": None, "largest": 0.0, "largest_in": None}


def test_the_lowest_bit_of_an_element_is_seen_and_the_largest_difference_is_named(tmp_path: Path) -> None:
    changed = tensors()
    changed["model.a"] = changed["model.a"] * 1.1
    changed["optimizer.exp_avg.b"].view(torch.int32)[1, 2] = 1
    found = compare(a_checkpoint(tmp_path / "one", changed), a_checkpoint(tmp_path / "two", tensors()))
    assert (found.tensors, found.equal, found.first_different) == (3, 1, "model.a")
    assert (found.largest, found.largest_in) == (1.0, "optimizer.exp_avg.b")
    del changed["optimizer.exp_avg.b"]
    found = compare(a_checkpoint(tmp_path / "three", changed), tmp_path / "two")
    assert (found.equal, found.largest, found.largest_in) == (1, math.inf, "optimizer.exp_avg.b")


def test_checkpoints_of_torchtitan_are_compared_too(tmp_path: Path) -> None:
    moment = torch.zeros(2, 2)
    state = {"norm.weight": torch.ones(3), "head.weight": torch.rand(4, 3), "optimizer": {"state.x": moment}}
    for name, ranks in (("one", 3), ("same", 3), ("other", 2)):
        write_dcp(tmp_path / name, state, ranks=ranks)
    assert compare(tmp_path / "one", tmp_path / "same").equal == 3
    assert compare(tmp_path / "one", tmp_path / "other").equal == 3
    moment.view(torch.int32)[1, 1] = 1
    write_dcp(tmp_path / "changed", state)
    found = compare(tmp_path / "one", tmp_path / "changed")
    assert (found.equal, found.first_different) == (2, "optimizer.state.x")
