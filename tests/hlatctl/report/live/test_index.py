"""The rows in memory are those of `hlatctl runs`, and only what has changed is read and sent.

A followed run has the state of its whole journal, and names the first step that has changed.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hlatctl.report import run_list
from hlatctl.report.live import index as live_index
from hlatctl.report.live.index import LiveIndex, OpenRun, first_new_row
from hlatctl.report.run_list import RunRow, row_of, rows
from hlatctl.report.run_view import RunView
from hlatctl.run.errors import RunNotFoundError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.lease import hold
from hlatctl.run.paths import RunPaths, cache_dir
from tests.hlatctl.conftest import MakeRun


@pytest.fixture
def runs_dir(make_run: MakeRun) -> Path:
    make_run("a", until="killed")
    folder = make_run("b").root.parent
    cache_dir(folder).mkdir()
    return folder


@pytest.fixture(autouse=True)
def _look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_index, "SCAN_S", 0.0)
    monkeypatch.setattr(live_index, "_SCAN_SHARE", 0)
    monkeypatch.setattr(live_index, "_READ_S", 60.0)


def _append(run: RunPaths, step: int, attempt: int = 1, *, loss: float = 1.0) -> None:
    with JournalWriter(run, train_writer(0), attempt) as train:
        train.append("step", step=step, tokens=step * 8192, loss=loss, step_s=0.5)


@contextmanager
def _driven(run: RunPaths) -> Iterator[None]:
    with hold(run.driver_lock, lambda holder: pytest.fail(str(holder))):
        yield


def _polled(runs_dir: Path) -> LiveIndex:
    index = LiveIndex(runs_dir)
    index.poll()
    return index


def test_rows_are_those_of_the_command(runs_dir: Path) -> None:
    index = _polled(runs_dir)
    assert index.complete
    expected = {row.run_id: vars(row) for row in rows(runs_dir)}
    assert {row["run_id"] for row in index.rows()} == {"a", "b"}
    for row in index.rows():
        assert {key: row[key] for key in expected[row["run_id"]]} == expected[row["run_id"]]


def test_only_changed_rows_are_told(runs_dir: Path) -> None:
    index = _polled(runs_dir)
    revision, changed, removed = index.changed_since(0)
    assert (len(changed), removed) == (2, [])
    assert not index.poll()
    _append(RunPaths(runs_dir / "a"), 131)
    assert index.poll()
    _, changed, _ = index.changed_since(revision)
    assert [(row["run_id"], row["step"]) for row in changed] == [("a", 131)]


def test_a_loss_that_is_not_finite_is_unknown_and_changes_nothing(runs_dir: Path) -> None:
    run = RunPaths(runs_dir / "a")
    _append(run, 131, loss=math.nan)
    with _driven(run):
        index = _polled(runs_dir)
        assert index.row("a")["loss"] is None
        assert not index.poll()


def test_a_running_run_is_followed(runs_dir: Path) -> None:
    run = RunPaths(runs_dir / "a")
    with _driven(run):
        index = _polled(runs_dir)
        assert index.row("a")["status"] == "running"
        index.poll()
        for step in range(131, 140):
            _append(run, step)
            index.poll()
            assert index.row("a")["step"] == step
        assert index.row("a")["left_s"] == pytest.approx((306 - 139) * 0.5)
    index.poll()
    assert (index.row("a")["status"], index.row("a")["needs_person"]) == ("interrupted", True)


def test_runs_come_and_go(runs_dir: Path, make_run: MakeRun) -> None:
    index = _polled(runs_dir)
    make_run("c")
    index.poll()
    assert index.row("c")["status"] == "finished"
    shutil.rmtree(runs_dir / "b")
    revision = index.revision
    index.poll()
    assert index.changed_since(revision)[2] == ["b"]
    assert {row["run_id"] for row in index.rows()} == {"a", "c"}
    with pytest.raises(RunNotFoundError):
        index.open("b")


def test_a_removed_run_that_comes_back_is_no_longer_removed(runs_dir: Path, make_run: MakeRun) -> None:
    index = _polled(runs_dir)
    shutil.rmtree(runs_dir / "b")
    index.poll()
    make_run("b")
    index.poll()
    assert index.changed_since(0)[2] == []
    assert index.row("b")["status"] == "finished"


def test_a_damaged_run_has_a_row_with_its_problem(runs_dir: Path) -> None:
    (runs_dir / "b" / "config.yaml").write_text("{", encoding="utf-8")
    row = _polled(runs_dir).row("b")
    assert (row["status"], row["needs_person"]) == ("damaged", True)
    assert row["problem"]
    assert row["what"] == row["problem"]
    json.dumps(row, allow_nan=False)


def test_a_known_index_is_answered_without_reading_runs(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(runs_dir)
    monkeypatch.setattr(run_list, "view_run", lambda run: pytest.fail(f"{run} was read"))
    monkeypatch.setattr(live_index, "OpenRun", lambda run: pytest.fail(f"{run} was read"))
    index = _polled(runs_dir)
    assert all(len(row["spark"]) == 40 for row in index.rows())
    assert [row["run_id"] for row in index.rows()] == [row.run_id for row in expected]
    assert index.complete


def test_a_run_that_a_page_reads_is_not_read_a_second_time(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = LiveIndex(runs_dir)
    opened = index.opened("a")
    with monkeypatch.context() as patch:
        patch.setattr(opened, "refresh_unless_busy", lambda: None)
        index.poll()
    assert [row["run_id"] for row in index.rows()] == ["b"]
    assert not index.complete
    assert index.row("a")["run_id"] == "a"
    index.poll()
    assert index.complete


def test_many_unknown_runs_are_read_over_several_polls(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_index, "_READ_S", 0.0)
    index, polls = LiveIndex(runs_dir), 0
    while not index.complete:
        index.poll()
        polls += 1
    assert polls == 2
    assert (cache_dir(runs_dir) / next(p.name for p in cache_dir(runs_dir).glob("runs-*"))).is_file()


@pytest.mark.parametrize("run_id", ["", "..", "../runs/a", ".", "a/../b", "A" * 5000, ".cache", "a\0"])
def test_only_ids_of_runs_name_one(runs_dir: Path, run_id: str) -> None:
    with pytest.raises(RunNotFoundError):
        _polled(runs_dir).find(run_id)


def test_a_folder_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    index = _polled(tmp_path / "later")
    assert index.complete
    assert index.rows() == []


def test_no_more_runs_are_kept_open_than_allowed(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_index, "_MOST_OPEN", 1)
    index = _polled(runs_dir)
    first = index.open("a")
    assert index.open("a") is first
    index.open("b")
    assert index.open("a") is not first


def test_one_run_that_cannot_be_shown_does_not_hide_the_others(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(view: RunView) -> RunRow:
        if view.run.run_id == "a":
            raise TypeError("unforeseen")
        return row_of(view)

    monkeypatch.setattr(live_index, "row_of", fail)
    index = _polled(runs_dir)
    assert index.complete
    assert (index.row("a")["status"], index.row("b")["status"]) == ("damaged", "finished")
    assert "unforeseen" in index.row("a")["problem"]


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    return make_run(until="killed")


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
    _append(run, 131)
    _append(run, 132)
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
    _append(run, 101, 2)
    opened.refresh()
    assert (opened.changed_from_step(before), opened.changed_from_step(between)) == (101, 101)


def test_one_that_was_away_too_long_gets_all_steps(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenRun(run)
    opened.refresh()
    before = opened.version
    opened._changes = type(opened._changes)(opened._changes, maxlen=2)
    for step in (131, 132, 133):
        _append(run, step)
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
    _append(run, 131)
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
