"""Checkpoints: which one is taken, which are kept, and that nothing in them is ever executed."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hlatctl.run.errors import CheckpointError, StorageError
from hlatctl.run.manifest import checkpoint_steps
from hlatctl.run.paths import RunPaths

MakeRun = Callable[..., RunPaths]
TrainHere = Callable[[RunPaths, int], int]
EventsOf = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def trained(tmp_path: Path, make_run: MakeRun, train_here: TrainHere) -> RunPaths:
    """24 steps, checkpoints of 8, 16 and 24."""
    run = make_run(tmp_path / "trained")
    assert train_here(run, 1) == 0
    return run


def _losses(run: RunPaths, attempt: int, events_of: EventsOf) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run, "step", attempt)}


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _shard(run: RunPaths, step: int) -> Path:
    return next(run.checkpoint(step).glob("*.safetensors"))


def test_damaged_checkpoint_is_rejected_and_the_one_before_is_taken(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    _damage(_shard(trained, 24))
    assert train_here(trained, 2) == 0
    (rejected,) = events_of(trained, "checkpoint_rejected", 2)
    assert rejected["step"] == 24
    assert rejected["reason"] == f"{_shard(trained, 24).name}: checksum differs"
    assert events_of(trained, "train_started", 2)[0]["resumed_from_step"] == 16
    first, again = _losses(trained, 1, events_of), _losses(trained, 2, events_of)
    assert again == {step: first[step] for step in range(17, 25)}
    assert train_here(trained, 3) == 0
    assert not events_of(trained, "checkpoint_rejected", 3)


def test_attempt_that_walks_back_begins_from_no_newer_checkpoint_than_it_may(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    from trainer.__main__ import main

    assert main(["--run-dir", str(trained.root), "--attempt", "2", "--max-checkpoint-step", "16"]) == 0
    assert events_of(trained, "train_started", 2)[0]["resumed_from_step"] == 16
    assert not events_of(trained, "checkpoint_rejected", 2)
    first, again = _losses(trained, 1, events_of), _losses(trained, 2, events_of)
    assert again == {step: first[step] for step in range(17, 25)}


def test_checkpoint_without_manifest_and_left_over_folders_do_not_count(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    (trained.checkpoint(24) / "manifest.json").unlink()
    left_over = trained.checkpoints / ".tmp-step-00000032"
    left_over.mkdir()
    assert train_here(trained, 2) == 0
    (rejected,) = events_of(trained, "checkpoint_rejected", 2)
    assert rejected["reason"].endswith("no manifest.json, so the checkpoint was never completed")
    assert not left_over.exists()


def test_no_valid_checkpoint_left_is_an_error_and_never_a_new_beginning(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    for step in checkpoint_steps(trained):
        _damage(_shard(trained, step))
    with pytest.raises(CheckpointError, match=r"no valid checkpoint, though steps \[8, 16, 24\] were written"):
        train_here(trained, 2)
    shutil.rmtree(trained.checkpoints)
    with pytest.raises(CheckpointError, match="the run will not silently begin again"):
        train_here(trained, 3)
    assert not events_of(trained, "step", 2)


def test_attempt_before_any_checkpoint_starts_from_the_initial_model(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "fresh")
    assert train_here(run, 2) == 0
    assert events_of(run, "train_started", 2)[0]["resumed_from_step"] == 0


def test_newest_and_milestones_are_kept(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    milestones = {"enabled": True, "every_tokens": 8 * 4 * 32}
    run = make_run(tmp_path / "kept", checkpoint={"every_steps": 3, "keep": 2}, eval=milestones)
    assert train_here(run, 1) == 0
    assert checkpoint_steps(run) == [8, 16, 18, 21, 24]
    reasons = {event["step"]: event["reason"] for event in events_of(run, "checkpoint_written")}
    assert (reasons[8], reasons[9], reasons[24]) == ("milestone", "interval", "final")
    assert [event["step"] for event in events_of(run, "checkpoint_deleted")] == [3, 6, 9, 12, 15]


def test_full_disk_stops_the_run_and_leaves_earlier_checkpoints_alone(
    trained: RunPaths, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    _damage(_shard(trained, 24))
    usage = shutil.disk_usage(trained.root)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"a checkpoint needs \d+ bytes, 1000 are free") as caught:
        train_here(trained, 2)
    needed = int(re.findall(r"needs (\d+)", caught.value.message)[0])
    assert needed > sum(path.stat().st_size for path in trained.checkpoint(16).glob("*.safetensors"))
    assert checkpoint_steps(trained) == [8, 16, 24]


def test_batch_of_another_size_can_not_go_on_from_a_checkpoint(
    trained: RunPaths, make_run: MakeRun, train_here: TrainHere
) -> None:
    make_run(trained.root, train={"global_batch_size": 8, "tokens": 24 * 8 * 32})
    with pytest.raises(CheckpointError, match=r"global batch has 4 sequences, train\.global_batch_size=8"):
        train_here(trained, 2)


class _Bomb(NamedTuple):
    target: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_planted_pickles_are_never_loaded(trained: RunPaths, train_here: TrainHere, tmp_path: Path) -> None:
    from hlatctl.run.manifest import read_manifest, write_manifest
    from trainer.export import read_weights

    exploded = tmp_path / "exploded"
    folder, bomb = trained.checkpoint(24), pickle.dumps(_Bomb(exploded))
    for name in (".metadata", "__0_0.distcp", "state.pt", "optimizer.bin"):
        (folder / name).write_bytes(bomb)
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder, step=24, tokens=manifest.tokens, world=manifest.world)
    assert train_here(trained, 2) == 0
    assert read_weights(trained, 24)
    assert not exploded.exists()
    pickle.loads(bomb)
    assert exploded.exists(), "the planted file would have told"
