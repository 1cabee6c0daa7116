"""Which documents a step was trained on: the same answer from any checkpoint as from the start."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from hlatctl.run import files
from hlatctl.run.checkpoint import RANK_STATES, RankStates, read_rank_states, write_manifest
from hlatctl.run.errors import ConfigError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events, train_writer
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeRun
from trainer.data import at
from trainer.data.at import documents_at, events_that_count
from trainer.data.loader import Loader


def _train(run: RunPaths, attempt: int, first: int, last: int, *, save: int, ranks: int) -> list[list[list[Any]]]:
    """What training does to the journal and the checkpoints; the spans of every sequence of its steps."""
    config, dataset = load(run.config), json.loads(run.dataset.read_text())
    state = None
    if first > 1:
        state = read_rank_states(run.checkpoint(first - 1)).loader
    events = read_events(run)
    loaders = [Loader(config, dataset, rank=r, size=ranks, state=state, events=events) for r in range(ranks)]
    spans = []
    with JournalWriter(run, train_writer(0), attempt) as journal:
        journal.append("train_started", resumed_from_step=first - 1, tokens=0)
        for step in range(first, last + 1):
            for loader in loaders:
                loader.next()
            spans.append([sequence for loader in loaders for sequence in loader.spans])
            journal.append("step", step=step, tokens=step, loss=1.0)
            if step == save:
                _save(run, step, loaders)
    for loader in loaders:
        loader.close()
    return spans


def _save(run: RunPaths, step: int, loaders: list[Loader]) -> None:
    folder = run.checkpoint(step)
    states = RankStates.of([{"loader": loader.state, "rng": {}} for loader in loaders])
    files.write_json(folder / RANK_STATES, dataclasses.asdict(states))
    write_manifest(folder, step=step, tokens=step, world={"world_size": len(loaders)})


def _printed(run: RunPaths, step: int) -> list[list[tuple[int, int, int]]]:
    """Row, first token and tokens of each stretch of each sequence."""
    return [
        [(d["row"], d["first_token"], d["tokens"]) for d in sequence]
        for sequence in documents_at(run, step)["sequences"]
    ]


def _expected(run: RunPaths, spans: list[list[Any]]) -> list[list[tuple[int, int, int]]]:
    from trainer.data.documents import sources_of

    (source,) = sources_of(json.loads(run.dataset.read_text()))
    return [[(source.origin(s.document).row, s.first, s.tokens) for s in sequence] for sequence in spans]


def test_every_step_has_the_same_documents_from_a_checkpoint_and_from_the_start(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", data={"skip_steps": [2, 6]})
    spans = _train(run, 1, 1, 8, save=4, ranks=2)
    assert _train(run, 2, 5, 8, save=0, ranks=1) == spans[4:], "on one rank as on two"
    before = {step: _printed(run, step) for step in (1, 3, 5, 8)}
    assert before == {step: _expected(run, spans[step - 1]) for step in before}
    assert documents_at(run, 8)["from_step"] == 4
    shutil.rmtree(run.checkpoints)
    assert documents_at(run, 8)["from_step"] == 0
    assert {step: _printed(run, step) for step in before} == before
    assert documents_at(run, 5)["batch"] == 7, "batches 2 and 6 are left out"


def test_later_amendments_do_not_change_earlier_steps(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = _train(run, 1, 1, 8, save=4, ranks=1)
    with JournalWriter(run, OPERATOR_WRITER) as operator:
        operator.append("data_changed", key="data.skip_steps", value=[5], by="me", why="a spike")
    assert _printed(run, 6) == _expected(run, first[5])
    second = _train(run, 2, 5, 6, save=0, ranks=1)
    assert _printed(run, 5) == _expected(run, second[0]) == _expected(run, first[5])
    assert documents_at(run, 5)["batch"] == 6
    answer = documents_at(run, 8)
    assert (answer["trained"], answer["batch"]) == (False, 9), "step 8 is not trained again: what it will get"


def test_amendments_of_the_trainer_count_at_once_and_an_operator_s_from_the_next_attempt() -> None:
    def event(kind: str, attempt: int = 1, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "attempt": attempt, **fields}

    skip: dict[str, Any] = {"key": "data.skip_steps", "by": "me"}
    events = [
        event("data_changed", 0, value=[1], **skip),
        event("train_started"),
        event("step", step=4),
        event("data_changed", 0, value=[2], **skip),
        event("data_changed", value=[3], **{**skip, "by": "trainer"}),
        event("step", step=5),
        event("data_changed", value=[4], **{**skip, "by": "trainer"}),
    ]
    assert [e["value"] for e in events_that_count(events, 5) if e["kind"] == "data_changed"] == [[1], [3]]


@pytest.mark.parametrize("step", [0, 25])
def test_step_that_the_run_does_not_have_is_refused(make_run: MakeRun, tmp_path: Path, step: int) -> None:
    with pytest.raises(ConfigError, match=rf"--step={step}: the run has steps 1 to 24"):
        documents_at(make_run(tmp_path / "run"), step)


def test_module_prints_the_answer_as_json(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    run = make_run(tmp_path / "run")
    assert at.main(["--run-dir", os.fspath(run.root), "--step", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (document, *_), *_ = answer["sequences"]
    line = corpus.read_text().splitlines()[document["row"] - 1]
    assert json.loads(line)["text"].startswith(document["text"])
    assert (answer["trained"], document["file"], len(answer["sequences"])) == (False, os.fspath(corpus), 4)
