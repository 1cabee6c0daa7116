"""Which checkpoints are deleted while evaluators read them."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run.journal import EVALUATE_WRITER, JournalWriter
from hlatctl.run.lease import Holder, hold
from hlatctl.run.manifest import folder_steps, write_manifest
from hlatctl.run.model_link import write_link
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeConfig
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.trust import CheckpointRecords

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
