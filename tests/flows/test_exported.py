"""The exported model of an evaluation that fails: when it is removed, and when it stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from flows import pretrain
from flows.runtime.context import FlowContext, open_context
from flows.stages import evaluate
from flows.stages.evaluate import Asked, remove_left_over
from hlatctl.run.errors import LaunchError
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from tests.flows.conftest import Recorder

_TOKENS = 1000
_ASKED = Asked(name="a" * 64, contracts={"1": {"piqa": "b" * 64}})


@pytest.fixture
def fail(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPaths]:
    """Return a function that evaluates a milestone in vain; ``meanwhile`` is called in each try."""
    config = compose(["cluster=local", "tracking=none", f"runs_dir={tmp_path / 'runs'}", "eval.max_retries=1"])

    def attempt(meanwhile: Callable[[RunPaths], object], asked: Asked | None) -> RunPaths:
        run = pretrain.create(config, argv=[])
        context = open_context(run, recorder)
        context.event("milestone", milestone_tokens=_TOKENS, tokens=_TOKENS, step=1)
        kept = run.eval(_TOKENS) / "model-of-another-command"
        kept.mkdir(parents=True)

        def job(ctx: FlowContext, step: int, name: str, *argv: str, **options: Any) -> None:
            if name.startswith("export"):
                made = Path(argv[argv.index("--to") + 1])
                made.mkdir()
                (made / "config.json").touch()
            else:
                meanwhile(run)
                raise LaunchError("the evaluation failed")

        monkeypatch.setattr(evaluate, "_run_beside_training", job)
        monkeypatch.setattr(evaluate, "weights_of", lambda *any_: "weights")
        assert evaluate.evaluate_milestone(context, _TOKENS, asked) == "failed"
        assert kept.is_dir()
        context.close()
        return run

    return attempt


def _models(run: RunPaths) -> list[str]:
    return sorted(path.name for path in run.eval(_TOKENS).glob("model*") if "another" not in path.name)


@pytest.mark.parametrize("asked", [_ASKED, None])
def test_a_failed_evaluation_that_measured_nothing_leaves_no_model(
    fail: Callable[..., RunPaths], asked: Asked | None
) -> None:
    assert _models(fail(lambda run: None, asked)) == []


@pytest.mark.parametrize("stored", ["answers/piqa.jsonl", "contract-2/tasks/piqa.json"])
def test_a_model_stays_if_something_was_measured(fail: Callable[..., RunPaths], stored: str) -> None:
    def measure(run: RunPaths) -> None:
        path = run.eval(_TOKENS) / stored
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("answers", encoding="utf-8")

    assert _models(fail(measure, _ASKED)) == ["model-aaaaaaaa"]


def test_a_model_stays_while_a_process_evaluates_the_milestone(fail: Callable[..., RunPaths]) -> None:
    held: list[AbstractContextManager[None]] = []

    def refuse(holder: Holder) -> None:
        raise AssertionError(holder)

    def lose(run: RunPaths) -> None:
        if not held:
            held.append(hold(run.eval_lease(_TOKENS), refuse))
            held[0].__enter__()

    try:
        assert _models(fail(lose, _ASKED)) == ["model-aaaaaaaa"]
    finally:
        held[0].__exit__(None, None, None)


def test_the_folder_of_an_external_model_is_never_removed(fail: Callable[..., RunPaths], tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").touch()
    assert _models(fail(lambda run: None, replace(_ASKED, model=own))) == []
    assert (own / "config.json").is_file()


def test_a_new_driver_removes_what_a_dead_one_has_left_of_evaluated_milestones(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    milestones = [
        MilestoneState(1000, 1, "evaluated"),
        MilestoneState(2000, 2, "due"),
        MilestoneState(3000, 3, "evaluated", is_partial=True),
        MilestoneState(4000, 4, "evaluated"),
    ]
    for milestone in milestones:
        run.own_model(milestone.milestone_tokens).mkdir(parents=True)
        (run.eval(milestone.milestone_tokens) / "model-aaaaaaaa").mkdir()

    def refuse(holder: Holder) -> None:
        raise AssertionError(holder)

    with hold(run.eval_lease(4000), refuse):
        remove_left_over(run, milestones)
    assert [m.step for m in milestones if run.own_model(m.milestone_tokens).is_dir()] == [2, 3, 4]
    assert all((run.eval(m.milestone_tokens) / "model-aaaaaaaa").is_dir() for m in milestones)
