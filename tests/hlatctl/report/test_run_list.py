"""The rows of `hlatctl runs` are those of the journals, whatever the index holds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.report import run_list
from hlatctl.report.run_list import Filter, RunRow, age, differing, ordered, rows, since, sparkline, tag_filter
from hlatctl.report.run_view import view_run
from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.lease import hold
from hlatctl.run.paths import RunPaths, cache_dir
from tests.hlatctl.conftest import MakeRun


@pytest.fixture
def runs_dir(make_run: MakeRun) -> Path:
    make_run("a", until="killed")
    folder = make_run("b").root.parent
    cache_dir(folder).mkdir()
    return folder


def _index(runs_dir: Path) -> Path:
    return cache_dir(runs_dir) / f"runs-{os.geteuid()}.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose journals are read."""
    names: list[str] = []

    def spy(run: RunPaths) -> Any:
        names.append(run.run_id)
        return view_run(run)

    monkeypatch.setattr(run_list, "view_run", spy)
    return names


def test_only_a_run_that_has_changed_is_read_again(runs_dir: Path, read: list[str]) -> None:
    first = rows(runs_dir)
    assert [(row.run_id, row.status) for row in first] == [("a", "interrupted"), ("b", "finished")]
    assert rows(runs_dir) == first
    assert read == ["a", "b"]
    with JournalWriter(RunPaths(runs_dir / "a"), FLOW_WRITER) as journal:
        journal.append("run_finished", outcome="failed", step=1, tokens=1, message="")
    assert [row.status for row in rows(runs_dir)] == ["failed", "finished"]
    assert read == ["a", "b", "a"]
    assert _index(runs_dir).stat().st_mode & 0o777 == 0o600, "runs can be more private than their folder"


def test_a_driver_is_seen_although_no_file_of_the_journal_changes(runs_dir: Path, read: list[str]) -> None:
    rows(runs_dir)
    with hold(RunPaths(runs_dir / "a").driver_lock, lambda holder: pytest.fail(str(holder))):
        assert [row.status for row in rows(runs_dir)] == ["running", "finished"]
    assert [row.status for row in rows(runs_dir)] == ["interrupted", "finished"]
    assert read == ["a", "b"]


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        index = files.read_sealed_json(path)
        change(index)
        files.write_sealed_json(path, index)

    return damage


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _flip(path: Path) -> None:
    path.write_text(path.read_text().replace('"finished"', '"finishes"'))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "edited": _flip,
    "cut": lambda path: os.truncate(path, 300),
    "foreign": lambda path: path.write_text(json.dumps([1, 2])),
    "of other code": _edit(lambda index: index.update(code=1)),
    "of other types": _edit(lambda index: index["runs"]["b"]["row"].update(step="x")),
    "of other fields": _edit(lambda index: index["runs"]["b"]["row"].pop("tokens")),
    "a folder": _make_folder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_index_is_discarded(runs_dir: Path, read: list[str], damage: Callable[[Path], object]) -> None:
    first = rows(runs_dir)
    damage(_index(runs_dir))
    assert rows(runs_dir) == first
    assert read == ["a", "b", "a", "b"]


def test_an_index_of_another_user_is_discarded(
    runs_dir: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(runs_dir)
    path, uid = _index(runs_dir), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    path.rename(_index(runs_dir))
    rows(runs_dir)
    assert read == ["a", "b", "a", "b"]


def test_a_damaged_run_is_read_each_time_and_a_removed_one_is_forgotten(
    runs_dir: Path, make_run: MakeRun, read: list[str]
) -> None:
    config = make_run("c").config
    config.write_text("train: [")
    for _ in range(2):
        assert [row.status for row in rows(runs_dir)][2:] == ["damaged"]
    assert read == ["a", "b", "c", "c"]
    config.unlink()
    RunPaths(runs_dir / "b").config.unlink()
    assert [row.run_id for row in rows(runs_dir)] == ["a"]
    assert list(files.read_sealed_json(_index(runs_dir))["runs"]) == ["a"]


def test_rows_are_shown_where_no_index_can_be_written(runs_dir: Path) -> None:
    cache_dir(runs_dir).rmdir()
    assert len(rows(runs_dir)) == 2
    assert not cache_dir(runs_dir).exists()


def test_values_of_options_are_no_overrides() -> None:
    argv = ["hlatctl", "train", "--tag", "model=tiny", "optimizer.lr=1", "--detach", "+a.b=2", "--note=x=y"]
    assert run_list.overrides_of(argv) == ["optimizer.lr=1", "+a.b=2"]


NOW = 1_700_000_000.0
ROW = RunRow(
    run_id="a",
    status="finished",
    simulated=False,
    step=10,
    total_steps=10,
    tokens=100,
    loss=3.0,
    validation_loss=None,
    created_unix_s=NOW - 100_000,
    last_event_unix_s=NOW - 90_000,
    experiment="quickstart",
    sweep="",
    name="",
    tags={"model": "small"},
    note="",
    overrides=["optimizer.lr=1e-4", "train.seq_len=512"],
    scores={},
    node_hours=1.0,
    cost_usd=None,
    parent="",
    path="/a",
    problem=None,
)


def row(**fields: Any) -> RunRow:
    return dataclasses.replace(ROW, **fields)


def test_only_what_differs_is_shown_with_the_shortest_distinct_key() -> None:
    rows = [ROW, row(overrides=["optimizer.lr=3e-4", "train.seq_len=512"]), row(overrides=["train.seq_len=512"])]
    assert differing(rows) == ["lr=1e-4", "lr=3e-4", ""]
    rows = [row(overrides=["model.name=x"]), row(overrides=["cluster.name=x", "+backend.env.A=1"])]
    assert differing(rows) == ["model.name=x", "cluster.name=x A=1"]
    assert differing([ROW]) == [""]
    switched = [row(overrides=["eval.enabled=false"]), row(overrides=["notify.enabled=true"])]
    assert differing([*switched[:1], ROW])[0] == "eval.enabled=false", "many keys end with this word"


@pytest.mark.parametrize(
    ("tags", "statuses", "experiment", "since_unix_s", "taken"),
    [
        ([], (), None, None, True),
        (["model"], (), None, None, True),
        (["model=small"], ("failed", "finished"), "quickstart", NOW - 90_000, True),
        (["model=large"], (), None, None, False),
        (["other"], (), None, None, False),
        ([], ("running",), None, None, False),
        ([], (), "drill", None, False),
        ([], (), None, NOW - 80_000, False),
    ],
)
def test_a_filter_takes_runs_that_have_everything(
    tags: list[str], statuses: tuple[str, ...], experiment: str | None, since_unix_s: float | None, taken: bool
) -> None:
    chosen = Filter(tags=tag_filter(tags), statuses=statuses, experiment=experiment, since_unix_s=since_unix_s)
    assert chosen.takes(ROW) is taken


def test_rows_without_a_value_or_with_nan_come_first() -> None:
    rows = [row(run_id="b", loss=2.0), row(run_id="none", loss=None), row(run_id="a", loss=1.0), row(loss="nan")]
    assert [each.loss for each in ordered(rows, "loss")] == [None, "nan", 1.0, 2.0]
    assert [each.run_id for each in ordered(rows, "loss", reverse=True)][:2] == ["b", "a"]
    with pytest.raises(ConfigError, match="did you mean loss"):
        ordered(rows, "los")


def test_an_age_or_a_date_is_a_time() -> None:
    assert since("7d", NOW) == NOW - 7 * 86_400
    assert since("2023-11-14", NOW) == 1_699_920_000
    for text in ("soon", "7", "2023-14-11", "-1d"):
        with pytest.raises(ConfigError, match="--since"):
            since(text, NOW)


def test_a_sparkline_has_the_range_after_the_start_and_shows_gaps_and_noise_as_they_are() -> None:
    fall = sparkline([9.0, 9.0, 9.0, 9.0, *(3 - step / 100 for step in range(36)), math.nan])
    assert fall[:5] == "zzzzz"
    assert fall[-1] == "0"
    assert list(fall[4:]) == sorted(fall[4:], reverse=True)
    assert sparkline([3.0, math.nan, 2.0]) == "z 0"
    assert max(sparkline([3.0, 3.01] * 100)) < "4", "less than a tenth of the height"
    assert (sparkline([]), sparkline([1.0]), sparkline([math.nan] * 9)) == ("", "", "")


def test_an_age_has_one_unit() -> None:
    assert [age(row(last_event_unix_s=NOW - s), NOW) for s in (5, 300, 7200, 90_000)] == ["5 s", "5 min", "2 h", "1 d"]
