"""The number of batches drawn at a checkpoint, from the journal or from the checkpoint.

Manifests: a complete checkpoint is valid, and an error names every kind of damage.

The ranks' own states of a checkpoint, in one file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlatctl.run import files
from hlatctl.run.checkpoint import (
    MANIFEST,
    RANK_STATES,
    RankStates,
    batches_drawn,
    checkpoint_steps,
    read_manifest,
    read_rank_states,
    why_invalid,
    write_manifest,
)
from hlatctl.run.errors import CheckpointError, DamagedFileError
from hlatctl.run.paths import RunPaths


def _event(kind: str, step: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "attempt": attempt, **fields}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose checkpoint of step 20 says 25."""
    run = RunPaths(tmp_path / "run")
    files.write_json(run.checkpoint(20) / RANK_STATES, asdict(RankStates.of([{"loader": [[25, 0, 0]], "rng": {}}])))
    return run


def test_no_batch_is_drawn_before_the_first_checkpoint(run: RunPaths) -> None:
    assert batches_drawn(run, 0, []) == 0


def test_the_journal_is_preferred_to_the_checkpoint(run: RunPaths) -> None:
    events = [_event("step", 19, batch=21), _event("step", 20, batch=22), _event("step", 21, batch=23)]
    assert batches_drawn(run, 20, events) == 22


def test_a_skipped_update_has_drawn_its_batch(run: RunPaths) -> None:
    assert batches_drawn(run, 20, [_event("nonfinite", 20, batch=22, action="skip")]) == 22


def test_the_attempt_that_wrote_the_checkpoint_counts(run: RunPaths) -> None:
    events = [
        _event("step", 20, attempt=1, batch=20),
        _event("checkpoint_committed", 20, attempt=1),
        _event("step", 20, attempt=2, batch=22),  # it died before it saved the step again
    ]
    assert batches_drawn(run, 20, events) == 20
    assert batches_drawn(run, 20, [*events, _event("checkpoint_committed", 20, attempt=2)]) == 22


@pytest.mark.parametrize("events", [[], [_event("step", 20), _event("checkpoint_committed", 20)]])
def test_without_the_number_in_the_journal_the_checkpoint_is_read(run: RunPaths, events: list[dict[str, Any]]) -> None:
    assert batches_drawn(run, 20, events) == 25


@pytest.mark.parametrize("content", ["{}", '{"loader": []}', "[", '{"loader": [["x"]]}'])
def test_a_number_that_is_nowhere_is_an_error_that_names_the_file(run: RunPaths, content: str) -> None:
    (run.checkpoint(20) / RANK_STATES).write_text(content)
    with pytest.raises(DamagedFileError, match=r"step-00000020/ranks\.json: can't be used") as caught:
        batches_drawn(run, 20, [])
    assert caught.value.hint == "`hlatctl checkpoint verify run`"


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


_RANKS: list[dict[str, Any]] = [
    {"loader": [[5, 0], [5, 1]], "rng": {"torch": "aa"}},
    {"loader": [], "rng": {"torch": "aa"}},
    {"loader": [[5, 2]], "rng": {"torch": "bb"}},
]


def test_equal_random_states_are_stored_once_and_each_rank_gets_its_own() -> None:
    states = RankStates.of(_RANKS)
    assert states.loader == [[5, 0], [5, 1], [5, 2]]
    assert states.rng == [{"torch": "aa"}, {"torch": "bb"}]
    assert [states.rng_for(rank)["torch"] for rank in range(5)] == ["aa", "aa", "bb", "aa", "aa"]


def test_they_are_read_back(tmp_path: Path) -> None:
    files.write_json(tmp_path / RANK_STATES, asdict(RankStates.of(_RANKS)))
    assert read_rank_states(tmp_path) == RankStates.of(_RANKS)


@pytest.mark.parametrize("text", ["{}", "[", '{"loader": 1, "rng": [], "rng_of_rank": []}', "null"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RANK_STATES).write_text(text)
    with pytest.raises(DamagedFileError, match=r"ranks\.json: can't be used"):
        read_rank_states(tmp_path)


def test_a_rank_without_a_state_is_named(tmp_path: Path) -> None:
    record = asdict(RankStates.of(_RANKS)) | {"rng_of_rank": [0, 0, 2]}
    files.write_json(tmp_path / RANK_STATES, record)
    with pytest.raises(DamagedFileError, match=r"rng_of_rank names a state that rng doesn't have"):
        read_rank_states(tmp_path)
