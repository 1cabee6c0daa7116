"""Tensors written to and read from a folder, and storage errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hlatctl.run.errors import CheckpointError, StorageError
from trainer.storage import describe_tensors, load_tensors, read_tensors, save_tensors


def test_tensors_come_back_in_the_number_format_that_is_asked_for(tmp_path: Path) -> None:
    written = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3) + 0.25
    save_tensors({"model.a": written, "model.b": torch.ones(2)}, tmp_path)
    described = describe_tensors(tmp_path)
    assert {name: (tuple(t.shape), t.dtype, t.is_meta) for name, t in described.items()} == {
        "model.a": ((2, 3), torch.bfloat16, True),
        "model.b": ((2,), torch.float32, True),
    }
    assert torch.equal(read_tensors(tmp_path, "model.a".__eq__)["model.a"], written)
    exact = torch.zeros(2, 3)
    load_tensors({"model.a": exact}, tmp_path)
    assert torch.equal(exact, written.float())


def test_folder_that_can_not_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/x: NotADirectoryError"):
        save_tensors({"model.a": torch.ones(2)}, tmp_path / "file" / "x")


def test_missing_tensor_and_other_shape_are_checkpoint_errors(tmp_path: Path) -> None:
    save_tensors({"model.a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.b is missing"):
        load_tensors({"model.b": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.a has shape \(2,\), expected \(3,\)"):
        load_tensors({"model.a": torch.ones(3)}, tmp_path)
