"""Texts of a milestone: stored with its scores, made once, and never a reason for an evaluation to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import generate, milestone
from eval.task_runner import Subject
from hlatctl.run import continuations
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths

MakeRun = Callable[..., RunPaths]
_PROMPTS = ["The quick", "def add("]


def _evaluate(run: RunPaths, model_folder: Path, **keys: Any) -> None:
    milestone.evaluate(Subject(run=run, milestone_tokens=1000, step=5, model_folder=model_folder, **keys))


def _make(make_run: MakeRun, **keys: Any) -> RunPaths:
    return make_run(**{"tasks": ["validation"], "prompts": _PROMPTS, "prompt_tokens": 4, **keys})


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the texts that are generated."""
    counts: list[int] = []
    real = generate.generate

    def counted(*arguments: Any, **keys: Any) -> generate.Text:
        text = real(*arguments, **keys)
        counts.append(len(text.token_ids))
        return text

    monkeypatch.setattr(generate, "generate", counted)
    return counts


def test_a_milestone_keeps_its_texts_and_makes_them_once(
    make_run: MakeRun, model_folder: Path, generated: list[int]
) -> None:
    run = _make(make_run)
    _evaluate(run, model_folder, weights="first")
    kept = continuations.newest(run, read_state(run).milestones)
    assert kept == continuations.read(run, 1000)
    assert kept is not None
    assert [one.prompt for one in kept.continuations] == _PROMPTS
    assert {one.stop for one in kept.continuations} <= {"max_new_tokens", "end_of_document"}
    assert (kept.milestone_tokens, kept.step, len(generated)) == (1000, 5, 2)
    assert max(generated) <= 4
    _evaluate(run, model_folder, weights="first")
    assert len(generated) == 2
    _evaluate(run, model_folder, weights="other")
    assert len(generated) == 4, "other weights have other texts"


def test_prompts_are_no_part_of_the_contract(make_run: MakeRun, model_folder: Path) -> None:
    before = _make(make_run, prompts=[])
    _evaluate(before, model_folder, weights="first")
    assert not before.continuations(1000).exists()
    _evaluate(_make(make_run), model_folder, weights="first")
    assert before.continuations(1000).exists()


def test_a_failure_costs_no_score(
    make_run: MakeRun, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(generate, "generate", fail)
    run = _make(make_run)
    _evaluate(run, model_folder)
    assert read_state(run).milestones[1000].status == "evaluated"
    assert continuations.history(run, [1000]) == []
    assert "eval.prompts: no texts (MemoryError: no room)" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_is_left_out(
    make_run: MakeRun, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _make(make_run, prompts=["<s>" * 300, "The"])
    _evaluate(run, model_folder)
    (kept,) = continuations.history(run, [1000])
    assert [one.prompt for one in kept.continuations] == ["The"]
    assert "has no text (prompt: has 301 tokens" in capsys.readouterr().err


def test_an_external_model_has_no_texts(make_run: MakeRun, model_folder: Path) -> None:
    run = _make(make_run, tasks=["smoke_crows_pairs"])
    _evaluate(run, model_folder, from_elsewhere=True)
    assert not run.continuations(1000).exists()


def test_a_changed_file_is_not_shown_and_made_again(make_run: MakeRun, model_folder: Path) -> None:
    run = _make(make_run)
    _evaluate(run, model_folder)
    path = run.continuations(1000)
    path.write_text(path.read_text(encoding="utf-8").replace("The quick", "The slow"), encoding="utf-8")
    assert continuations.newest(run, [1000]) is None
    _evaluate(run, model_folder)
    assert continuations.newest(run, [1000]) is not None
