"""A followed run has the state of its whole journal, and names the first step that has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hlatctl.report.live.index import OpenRun, first_new_row
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    return make_run(until="killed")


def _step(run: RunPaths, step: int, attempt: int = 1) -> None:
    with JournalWriter(run, train_writer(0), attempt) as train:
        train.append("step", step=step, tokens=step * 8192, loss=1.0, step_s=0.5)


def _started(run: RunPaths, attempt: int, resumed_from_step: int) -> None:
    with JournalWriter(run, "flow") as flow:
        flow.append("attempt_started", attempt_number=attempt, handle={})
    with JournalWriter(run, train_writer(0), attempt) as train:
        train.append("train_started", resumed_from_step=resumed_from_step, tokens=0)


def test_only_new_steps_are_named(run: RunPaths) -> None:
    opened = OpenRun(run)
    assert opened.refresh().state.step == 130
    before = opened.version
    assert opened.changed_from_step(before) is None
    _step(run, 131)
    _step(run, 132)
    assert opened.refresh().state == read_state(run)
    assert opened.changed_from_step(before) == 131
    assert opened.changed_from_step(opened.version) is None


def test_a_note_changes_no_step(run: RunPaths) -> None:
    opened = OpenRun(run)
    opened.refresh()
    before = opened.version
    with JournalWriter(run, "operator") as journal:
        journal.append("labelled", by="me", note="look", tags={}, untag=[])
    assert opened.refresh().state.labels.notes[0].text == "look"
    assert opened.version == before + 1
    assert opened.changed_from_step(before) is None


def test_a_restart_names_the_first_step_that_is_trained_again(run: RunPaths) -> None:
    opened = OpenRun(run)
    opened.refresh()
    before = opened.version
    _started(run, 2, 100)
    assert opened.refresh().state.step == 100
    assert opened.changed_from_step(before) == 101
    between = opened.version
    _step(run, 101, 2)
    opened.refresh()
    assert (opened.changed_from_step(before), opened.changed_from_step(between)) == (101, 101)


def test_one_that_was_away_too_long_gets_all_steps(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenRun(run)
    opened.refresh()
    before = opened.version
    opened._changes = type(opened._changes)(opened._changes, maxlen=2)
    for step in (131, 132, 133):
        _step(run, step)
        opened.refresh()
    assert opened.changed_from_step(before) == 0
    assert opened.changed_from_step(before + 1) == 132


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_journal_that_is_not_the_same_is_read_again(run: RunPaths, how: str) -> None:
    opened = OpenRun(run)
    opened.refresh()
    before, path = opened.course, run.journal / f"{train_writer(0)}.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:51]
    if how == "replaced":
        other = path.with_suffix(".new")
        other.write_bytes(b"".join(kept) + b" " * path.stat().st_size + b"\n")
        other.replace(path)
    else:
        path.write_bytes(b"".join(kept))
    assert opened.refresh().state.step == 50
    assert opened.course == before + 1
    assert opened.changed_from_step(1) == 0


def test_a_run_that_is_removed_becomes_damaged_and_comes_back(run: RunPaths, tmp_path: Path) -> None:
    opened = OpenRun(run)
    assert opened.refresh().status == "interrupted"
    away = tmp_path / "away"
    shutil.move(run.root, away)
    assert opened.refresh().status == "damaged"
    shutil.move(away, run.root)
    assert opened.refresh().status == "interrupted"
    assert opened.state.step == 130


def test_events_are_those_of_the_journal_without_steps(run: RunPaths) -> None:
    opened = OpenRun(run)
    opened.refresh()
    first = len(opened.events)
    assert first > 10
    _step(run, 131)
    with JournalWriter(run, train_writer(0), 1) as train:
        train.append("rank_times", step=140, median_s=0.1)
        train.append("warning", message="hot")
    opened.refresh()
    assert [event["kind"] for event in opened.events[first:]] == ["warning"]
    again = OpenRun(run)
    again.refresh()
    assert json.dumps(again.events) == json.dumps(opened.events)


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ([], [[0, 5]], 0),
        ([[0, 5]], [[0, 9]], 5),
        ([[0, 5]], [[0, 3]], None),
        ([[0, 5]], [[0, 3], [5, 8]], 5),
        ([[0, 5], [7, 9]], [[0, 5], [7, 12]], 9),
        ([[0, 5], [7, 9]], [[0, 5]], None),
        ([[0, 5]], [[7, 9]], 7),
        ([[0, 5]], [[0, 5], [8, 9]], 8),
    ],
)
def test_the_first_new_row(before: list[list[int]], after: list[list[int]], row: int | None) -> None:
    assert first_new_row(before, after) == row


def test_a_configuration_that_is_damaged_while_the_run_is_open_is_a_problem_until_it_is_repaired(run: RunPaths) -> None:
    opened, config = OpenRun(run), run.config.read_bytes()
    assert opened.refresh().status == "interrupted"
    run.config.write_bytes(b"\0\xff: [")
    assert (opened.refresh().status, "config.yaml" in opened.refresh().problem) == ("damaged", True)
    run.config.write_bytes(config)
    assert opened.refresh().status == "interrupted"
