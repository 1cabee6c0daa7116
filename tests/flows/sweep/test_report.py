"""A sweep's report, from simulated trials: the best arm, importances of axes, page and files."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest

from conf import compose as composition
from conf.compose import compose
from flows.sweep.book import Book
from flows.sweep.driver import _Driver, drive
from flows.sweep.report import build
from hlatctl.run.errors import StorageError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.paths import SweepPaths
from tests.flows.sweep.test_driver import make, silent, state_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> SweepPaths:
    """Two axes and two seeds; the simulated losses depend on the learning rate only."""
    sweep = make(
        tmp_path_factory.mktemp("runs"),
        "experiment=ablation",
        "optimizer.lr=3e-3,1e-2",
        "precision=bf16,mixed",
        "sweep.seeds=2",
    )
    drive(sweep, silent)
    build(sweep)
    return sweep


def test_the_page_has_every_arm_every_figure_and_says_that_it_is_simulated(swept: SweepPaths) -> None:
    page = (swept.report / "index.html").read_text(encoding="utf-8")
    assert "<strong>SIMULATED</strong>" in page
    assert page.count("data:image/svg+xml;base64") == 3
    assert all(f"<td>{trial.run_id}</td>" in page for trial in state_of(swept).trials.values())
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (swept.report / "figures").iterdir()}
    assert set(drawn) == {"loss", "settings", "importances"}
    assert "lr=0.003 precision=bf16" in drawn["loss"]
    assert "optimizer.lr" in drawn["settings"]


def test_the_numbers_say_which_axis_matters_and_the_best_arm_first(swept: SweepPaths) -> None:
    record = json.loads((swept.report / "numbers.json").read_text(encoding="utf-8"))
    assert list(record["importances"]) == ["optimizer.lr", "precision"]
    assert record["importances"]["optimizer.lr"] > 0.95
    assert sum(record["importances"].values()) == pytest.approx(1.0)
    first, *others = record["best_first"]
    assert first["point"]["optimizer.lr"] == "0.003"
    assert len(first["values"]) == 2
    assert len(others) == 3
    assert others[-1]["off_the_best"][0] == pytest.approx(others[-1]["mean"] - first["mean"])
    summary = (swept.report / "summary.md").read_text(encoding="utf-8")
    assert "| optimizer.lr | 100 % |" in summary
    assert record["command"] in summary
    assert "![loss](figures/loss.svg)" in summary


def test_the_best_arm_composes_from_its_command_and_from_its_file(
    swept: SweepPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((swept.report / "numbers.json").read_text(encoding="utf-8"))
    words = shlex.split(record["command"])
    assert words[:2] == ["hlatctl", "train"]
    typed = compose(words[2:])
    assert (typed.optimizer.lr, typed.cluster.launcher, typed.experiment_name) == (0.003, "local", "ablation")
    shutil.copytree(composition.CONF_DIR, tmp_path / "conf", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(swept.best, tmp_path / "conf" / "experiment" / "mine.yaml")
    monkeypatch.setattr(composition, "CONF_DIR", tmp_path / "conf")
    assert compose(["experiment=mine"]) == typed
    assert dataclasses.replace(compose(["experiment=mine", "optimizer.lr=1"]).optimizer, lr=0.003) == typed.optimizer


def test_the_same_journals_give_the_same_report(swept: SweepPaths) -> None:
    files = [path for path in swept.report.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    build(swept)
    assert {path: path.read_bytes() for path in files} == before


def test_a_sweep_without_results_has_a_report(tmp_path: Path) -> None:
    sweep = make(tmp_path, "seed=1,2")
    assert "No trials yet." in build(sweep).read_text(encoding="utf-8")
    with JournalWriter(sweep, FLOW_WRITER) as journal:
        journal.append("trial_asked", trial=0, run_id="s-t0000", arm=0, point={"seed": "1"}, overrides=[], seed=None)
        journal.append("trial_rung", trial=0, tokens=10, value=float("nan"))
        journal.append(
            "trial_ended",
            trial=0,
            outcome="failed",
            why="<b>",
            value=None,
            tokens=10,
            process_hours=0.0,
            saved_process_hours=0.0,
        )
    page = build(sweep).read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page
    assert "The best arm" not in page
    assert not sweep.best.exists()
    record = json.loads((sweep.report / "numbers.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (record["command"], record["trials"]["0"]["rungs"]) == (None, {"10": None})


def test_a_report_that_can_not_be_written_is_reported_and_fails_no_sweep(tmp_path: Path) -> None:
    sweep = make(tmp_path, "seed=1,2")
    sweep.report.write_text("in the way", encoding="utf-8")
    with pytest.raises(StorageError, match="report: can't be written"):
        build(sweep)
    said: list[str] = []
    book = Book(sweep)
    _Driver(book, said.append, None)._report()
    book.close()
    assert said == [f"no report: {sweep.report}: can't be written (File exists); `hlatctl sweep-report s` tries again"]
