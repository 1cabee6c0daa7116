"""Tensors written to and read from a folder, and storage errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hlatctl.run.errors import CheckpointError, StorageError
from trainer.storage import describe_tensors, load_tensors, read_tensors, save_tensors


def test_tensors_come_back_in_the_number_format_that_is_asked_for(tmp_path: Path) -> None:
    written = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3) + 0.25
    save_tensors({"model.a": written, "model.b": torch.ones(2)}, tmp_path, alone=True)
    described = describe_tensors(tmp_path)
    assert {name: (tuple(t.shape), t.dtype, t.is_meta) for name, t in described.items()} == {
        "model.a": ((2, 3), torch.bfloat16, True),
        "model.b": ((2,), torch.float32, True),
    }
    assert torch.equal(read_tensors(tmp_path, "model.a".__eq__)["model.a"], written)
    exact = torch.zeros(2, 3)
    load_tensors({"model.a": exact}, tmp_path, alone=True)
    assert torch.equal(exact, written.float())


def test_folder_that_can_not_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/x: rank 0: NotADirectoryError"):
        save_tensors({"model.a": torch.ones(2)}, tmp_path / "file" / "x", alone=True)


def test_missing_tensor_and_other_shape_are_checkpoint_errors(tmp_path: Path) -> None:
    save_tensors({"model.a": torch.ones(2)}, tmp_path, alone=True)
    with pytest.raises(CheckpointError, match=r"rank 0: RuntimeError: Missing key in checkpoint state_dict: model\.b"):
        load_tensors({"model.b": torch.ones(2)}, tmp_path, alone=True)
    with pytest.raises(CheckpointError, match=r"rank 0: ValueError: Size mismatch"):
        load_tensors({"model.a": torch.ones(3)}, tmp_path, alone=True)
