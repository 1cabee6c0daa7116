"""Manifests: a complete checkpoint is valid, and an error names every kind of damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlatctl.run.errors import CheckpointError
from hlatctl.run.manifest import MANIFEST, checkpoint_steps, read_manifest, why_invalid, write_manifest
from hlatctl.run.paths import RunPaths

SHARDS = {"model.safetensors": bytes(range(256)) * 4, "optimizer/rank0.bin": b"moments" * 50}


def checkpoint(root: Path, step: int = 7) -> Path:
    folder = RunPaths(root / "r").checkpoint(step)
    for name, content in SHARDS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, step=step, tokens=70, world={"data_parallel_size": 2})
    return folder


def test_a_complete_checkpoint_is_valid(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert why_invalid(folder) is None
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.tokens, manifest.world) == (7, 70, {"data_parallel_size": 2})
    assert sorted(entry["path"] for entry in manifest.files) == sorted(SHARDS)


@settings(max_examples=60)
@given(st.sampled_from(sorted(SHARDS)), st.integers(0), st.sampled_from(["flip", "cut", "append", "delete"]))
def test_any_damaged_file_is_found_and_named(name: str, where: int, how: str) -> None:
    with TemporaryDirectory() as root:
        folder = checkpoint(Path(root))
        path = folder / name
        content = bytearray(path.read_bytes())
        at = where % len(content)
        if how == "flip":
            content[at] ^= 1 << where % 8
        elif how == "cut":
            del content[at:]
        else:
            content += b"\0"
        path.write_bytes(content)
        if how == "delete":
            path.unlink()
        reason = why_invalid(folder)
        assert reason is not None
        assert reason.startswith(f"{name}: ")


def test_a_flipped_bit_is_missed_only_without_checksums(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert why_invalid(folder, checksums=False) is None
    assert why_invalid(folder) == "model.safetensors: checksum differs"


def test_a_checkpoint_without_a_manifest_was_never_completed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / MANIFEST).unlink()
    assert why_invalid(folder) == f"{folder}: no {MANIFEST}, so the checkpoint was never completed"
    assert checkpoint_steps(RunPaths(tmp_path / "r")) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"step": 7}',
        '{"step":"x","tokens":1,"world":{},"files":[],"v":1}',
        "[" * 100_000,
        '{"step":7,"tokens":1e999,"world":{},"files":[],"v":1}',
        '{"step":7,"tokens":NaN,"world":{},"files":[],"v":1}',
        '{"step":7,"tokens":1,"world":{},"files":[{"path":"a"}],"v":1}',
        "\udcff",
    ],
    ids=lambda text: text[:25],
)
def test_an_unreadable_manifest_is_an_error_with_its_path(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path)
    (folder / MANIFEST).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"manifest\.json: unreadable manifest"):
        read_manifest(folder)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_manifest_that_is_no_file_is_an_error_and_never_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = checkpoint(tmp_path)
    (folder / MANIFEST).unlink()
    make(folder / MANIFEST)
    with pytest.raises(CheckpointError, match=r"manifest\.json: unreadable manifest \(is "):
        read_manifest(folder)
    assert "unreadable manifest" in str(why_invalid(folder))


def test_a_manifest_that_says_something_else_than_was_written_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path) / MANIFEST
    for original, other in (('"tokens": 70', '"tokens": 71'), ('"data_parallel_size": 2', '"data_parallel_size": 3')):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(original, other), encoding="utf-8")
        assert str(why_invalid(path.parent)).endswith("unreadable manifest (its own checksum differs)")
        path.write_text(text, encoding="utf-8")
    assert why_invalid(path.parent) is None


def test_a_manifest_in_another_steps_folder_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    moved = folder.rename(folder.with_name("step-00000008"))
    assert why_invalid(moved) == "manifest.json: step 7 in a folder named step-00000008"


def test_checkpoints_are_listed_by_step_and_other_folders_are_not(tmp_path: Path) -> None:
    for step in (100, 9, 123456789):
        checkpoint(tmp_path, step)
    run = RunPaths(tmp_path / "r")
    (run.checkpoints / ".step-00000200.partial").mkdir()
    (run.checkpoints / "step-00000300").mkdir()
    assert checkpoint_steps(run) == [9, 100, 123456789]
