"""Verification of a checkpoint by all ranks, and which checkpoints are deleted while evaluators read them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from hlatctl.run import files
from hlatctl.run.checkpoint import MANIFEST, folder_steps, read_manifest, steps_in, write_manifest
from hlatctl.run.journal import EVALUATE_WRITER, JournalWriter, train_writer
from hlatctl.run.lease import Holder, hold
from hlatctl.run.model_folder import write_link
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeConfig
from tests.trainer.rank_threads import on_ranks
from trainer.checkpoint.shards import INDEX, compose, file_name, save_tensors
from trainer.checkpoint.together import Together
from trainer.checkpoint.trust import CheckpointRecords, Tiers, Verifier, share

ThreeSteps = tuple[RunPaths, CheckpointRecords]
_STEP_TOKENS = 4 * 32
_MILESTONE: dict[str, Any] = {"milestone_tokens": 6 * _STEP_TOKENS, "step": 6}


def _refuse(holder: Holder) -> None:
    raise AssertionError(holder)


def _evaluating(run: RunPaths) -> AbstractContextManager[None]:
    """Return what `hlatctl eval` holds while it lives."""
    return hold(run.evaluator_lock, _refuse)


@pytest.fixture
def three_steps(make_config: MakeConfig, tmp_path: Path) -> ThreeSteps:
    """A run with checkpoints of steps 6 to 8, which keeps the newest; the first one is a milestone's."""
    config = make_config(checkpoint={"keep": 1}, eval={"enabled": True, "every_tokens": 6 * _STEP_TOKENS})
    run = RunPaths(tmp_path / "run")
    for step in (6, 7, 8):
        run.checkpoint(step).mkdir(parents=True)
        write_manifest(run.checkpoint(step), step=step, tokens=step * _STEP_TOKENS, world={})
    records = CheckpointRecords(config, run, Tiers(config, run), None)
    return run, records


@pytest.mark.parametrize(
    ("missing_bytes", "verified", "left"),
    [
        (1, (3, 4), [2, 3, 4]),
        (1001, (3, 4), [3, 4]),
        (2001, (3, 4), [4]),
        (2001, (2, 3), [1, 2, 3, 4]),  # the verified one stays too, so the others are too few
        (1, (), [1, 2, 3, 4]),
    ],
)
def test_room_is_made_from_the_oldest_checkpoints_if_that_is_enough_and_a_verified_one_stays(
    tmp_path: Path, make_config: MakeConfig, missing_bytes: int, verified: tuple[int, ...], left: list[int]
) -> None:
    config, run = make_config(checkpoint={"keep": 4}), RunPaths(tmp_path / "run")
    for step in range(1, 5):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "shard").write_bytes(bytes(1000))
        write_manifest(run.checkpoint(step), step=step, tokens=step, world={})
    with JournalWriter(run, train_writer(0)) as journal:
        records = CheckpointRecords(config, run, Tiers(config, run), journal)
        for step in range(1, 5):
            records.committed(step, "")
        for step in verified:
            records.examined(step, run.checkpoint(step), None)
        assert records.make_room(missing_bytes) == (left != [1, 2, 3, 4])
    assert steps_in(run.checkpoints) == left


@pytest.mark.parametrize(
    "released", [("eval_finished", {"scores": {}}), ("eval_failed", {"message": "no memory"}), ("eval_stopped", {})]
)
def test_an_evaluated_milestone_stays_while_another_evaluation_of_it_runs(
    three_steps: ThreeSteps, released: tuple[str, dict[str, Any]]
) -> None:
    run, records = three_steps
    kind, fields = released
    with _evaluating(run), JournalWriter(run, EVALUATE_WRITER) as journal:
        journal.append("milestone", tokens=6 * _STEP_TOKENS, **_MILESTONE)
        journal.append("eval_finished", scores={}, **_MILESTONE)
        journal.append("eval_taken", **_MILESTONE)
        records.delete_unneeded()
        assert folder_steps(run) == [6, 8]
        journal.append(kind, **_MILESTONE, **fields)
    records.delete_unneeded()
    assert folder_steps(run) == [8]


@pytest.mark.parametrize("lost_mark", [("eval_finished", {"scores": {}}), ("head_started", {"pid": 1, "host": "h"})])
def test_a_checkpoint_that_an_evaluation_s_model_links_to_stays_without_the_milestone_s_mark(
    three_steps: ThreeSteps, lost_mark: tuple[str, dict[str, Any]]
) -> None:
    run, records = three_steps
    model = run.eval(6 * _STEP_TOKENS) / "model-of-a-second-evaluation"
    model.mkdir(parents=True)
    write_link(model, run_dir=run.root, step=6, manifest_sha256="0" * 64)
    kind, fields = lost_mark
    with _evaluating(run), JournalWriter(run, EVALUATE_WRITER) as journal:
        journal.append("milestone", tokens=6 * _STEP_TOKENS, **_MILESTONE)
        journal.append("eval_finished", scores={}, **_MILESTONE)
        journal.append("eval_taken", **_MILESTONE)
        journal.append(kind, **_MILESTONE, **fields)
        records.delete_unneeded()
        assert folder_steps(run) == [6, 8]
        shutil.rmtree(model)
        records.delete_unneeded()
    assert folder_steps(run) == [8]


def test_neither_the_mark_nor_the_link_of_a_killed_evaluation_keeps_a_checkpoint(three_steps: ThreeSteps) -> None:
    run, records = three_steps
    tokens = int(_MILESTONE["milestone_tokens"])
    model = run.eval(tokens) / "model-of-a-killed-evaluation"
    model.mkdir(parents=True)
    write_link(model, run_dir=run.root, step=6, manifest_sha256="0" * 64)
    with JournalWriter(run, EVALUATE_WRITER) as journal:
        journal.append("milestone", tokens=6 * _STEP_TOKENS, **_MILESTONE)
        journal.append("eval_finished", scores={}, **_MILESTONE)
        journal.append("eval_taken", **_MILESTONE)
    with hold(run.eval_lease(tokens), _refuse):  # its job has outlived it
        records.delete_unneeded()
        assert folder_steps(run) == [6, 8]
    records.delete_unneeded()
    assert folder_steps(run) == [8]


def test_the_link_of_the_run_s_own_evaluation_keeps_a_checkpoint_until_its_driver_removes_it(
    three_steps: ThreeSteps,
) -> None:
    run, records = three_steps
    model = run.own_model(int(_MILESTONE["milestone_tokens"]))
    model.mkdir(parents=True)
    write_link(model, run_dir=run.root, step=6, manifest_sha256="0" * 64)
    with JournalWriter(run, EVALUATE_WRITER) as journal:
        journal.append("milestone", tokens=6 * _STEP_TOKENS, **_MILESTONE)
        journal.append("eval_finished", scores={}, **_MILESTONE)  # by `hlatctl eval` meanwhile
    records.delete_unneeded()
    assert folder_steps(run) == [6, 8]
    shutil.rmtree(model)
    records.delete_unneeded()
    assert folder_steps(run) == [8]


_RANKS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of step 7 by three ranks, each with a tensor of its own."""
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    shards = [save_tensors({f"model.{n}": torch.randn(4, 2)}, folder, number=n + 1) for n in range(_RANKS)]
    index = compose({shard.entry["path"]: shard.chunks for shard in shards if shard})
    files.write_text(folder / INDEX, index.text)
    files.write_json(folder / "state.json", {})
    write_manifest(folder, step=7, tokens=7, world={"world_size": _RANKS})
    return folder


def _reasons(folder: Path) -> list[Any]:
    def work(backend: Any) -> str | None:
        return Verifier(backend, Together(backend, folder, lambda: 600.0)).why_invalid(folder, from_storage=True)

    return on_ranks(_RANKS, work)


def test_every_file_is_in_one_share_and_a_rank_verifies_the_shard_that_it_wrote(folder: Path) -> None:
    entries = read_manifest(folder).files
    shares = [[entry["path"] for entry in share(entries, rank, _RANKS)] for rank in range(_RANKS)]
    assert shares[1:] == [[file_name(2)], [file_name(3)]]
    assert sorted(shares[0]) == sorted([file_name(1), INDEX, "state.json"])
    fewer = [entry["path"] for rank in range(2) for entry in share(entries, rank, 2)]
    assert sorted(fewer) == sorted(entry["path"] for entry in entries)


def test_a_complete_checkpoint_is_valid(folder: Path) -> None:
    assert _reasons(folder) == [None] * _RANKS


@pytest.mark.parametrize("name", [file_name(1), file_name(3), INDEX, "state.json"])
def test_a_changed_byte_in_any_share_is_a_reason_on_all_ranks(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert _reasons(folder) == [f"{name}: checksum differs"] * _RANKS


def _cut(folder: Path) -> str:
    (folder / file_name(2)).write_bytes((folder / file_name(2)).read_bytes()[:-4])
    return f"{file_name(2)}: its tensors end at byte"


def _lose_a_shard(folder: Path) -> str:
    (folder / file_name(2)).unlink()
    return f"model.1: ends at byte 224 of {file_name(2)}, which is shorter"


def _lose_rows(folder: Path) -> str:
    lines = (folder / INDEX).read_text().splitlines()
    lines[1] = lines[1].replace("[4,2],[[", "[5,2],[[")
    (folder / INDEX).write_text("\n".join(lines))
    return "model.0: 2 elements are in no shard"


def _spoil_json(folder: Path) -> str:
    (folder / "state.json").write_text("{")
    return "state.json: "


def _spoil_index(folder: Path) -> str:
    (folder / INDEX).write_text('{"files": ["../a"], "v": 1}\n')
    return f"{folder / INDEX}: can't be read (names a file outside"


@pytest.mark.parametrize("spoil", [_cut, _lose_a_shard, _lose_rows, _spoil_json, _spoil_index])
def test_a_manifest_with_right_hashes_does_not_make_useless_files_valid(
    folder: Path, spoil: Callable[[Path], str]
) -> None:
    """The hashes say that a file is as it was written, not that it was written well."""
    reason = spoil(folder)
    (folder / MANIFEST).unlink()
    write_manifest(folder, step=7, tokens=7, world={"world_size": _RANKS})
    for found in _reasons(folder):
        assert found is not None
        assert found.startswith(reason)


def test_a_checkpoint_without_manifest_is_invalid_on_all_ranks(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert _reasons(folder) == [f"{folder}: no manifest.json, so the checkpoint was never completed"] * _RANKS
