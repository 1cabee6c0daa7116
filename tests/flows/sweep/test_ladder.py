"""A ladder: its rungs, the forecast that precedes its target, and the result beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.sweep import create
from flows.sweep.book import Book
from flows.sweep.driver import drive
from flows.sweep.report import build
from hlatctl.cli.main import main
from hlatctl.plan import scaling
from hlatctl.report.live.sweeps import details
from hlatctl.run.errors import ConfigError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, read_events
from hlatctl.run.paths import SweepPaths
from tests.flows.sweep.test_driver import silent, state_of

SMALL = (
    "experiment=ablation",
    "train.tokens=200K",
    "cluster.processes_per_node=1",
    "recovery.backoff_s=0",
    "tracking=none",
    "ladder.by=depth",
    "ladder.sizes=[1,2,3]",
)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_DRAWS", 20)


def make(runs_dir: Path, *arguments: str) -> SweepPaths:
    prepared = create.prepare(
        [*SMALL, f"runs_dir={runs_dir}", *arguments], folder=runs_dir, simulated=True, is_ladder=True
    )
    return create.make(prepared, sweep_id="l", argv=["hlatctl", "ladder"])


@pytest.mark.processes
def test_a_forecast_is_recorded_before_the_target_trains_and_compared_with_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    ladder = make(tmp_path, "ladder.tokens_per_parameter=[0.5,0.6]", "eval.enabled=true", "sweep.parallel=2")
    state = drive(ladder, said.append)
    assert (state.status, state.count("finished"), state.noun) == ("finished", 6, "ladder")
    made = state.forecast
    assert made is not None
    assert (made.law, len(made.rungs), made.objective) == ("compute", 6, "validation_loss")
    assert any(line.startswith("forecast of the target's validation_loss: ") for line in said)
    assert main(["status", "l", "--runs-dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "times the compute of the largest of 6 rungs" in captured.out
    assert "hint: `hlatctl ladder --target l` trains the target" in captured.err

    prepared = create.prepare_target(ladder)
    assert (prepared.plan.trials, prepared.plan.tokens) == (1, prepared.configs[-1].total_tokens)
    create.extend(ladder, prepared, argv=[])
    again = drive(ladder, silent)
    assert (again.status, again.count("finished"), again.forecast) == ("finished", 7, made)
    events = [str(event["kind"]) for event in read_events(ladder.trial(6)) if event["writer"] == FLOW_WRITER]
    assert events[:2] == ["run_created", "forecast_made"]
    of_run = read_state(ladder.trial(6)).forecast
    assert of_run is not None
    assert of_run.fields == made.fields, "the run has the same forecast as the ladder"
    with pytest.raises(ConfigError, match="its target is a trial already"):
        create.prepare_target(ladder)

    assert main(["status", "l-t0006", "--runs-dir", str(tmp_path)]) == 0
    assert "the forecast is " in capsys.readouterr().out
    page = build(ladder).read_text(encoding="utf-8")
    assert "<h2>Rungs and target</h2>" in page
    assert (ladder.report / "figures" / "forecast.svg").is_file()
    assert json.loads(json.dumps(details(ladder)))["forecast"]["results"] == [again.trials[6].value]


def test_the_target_waits_for_a_forecast_which_needs_three_finished_rungs(tmp_path: Path) -> None:
    ladder = make(tmp_path, "ladder.train_target=true")
    for number in range(3):
        book = Book(ladder)
        assert book.ask() == number
        assert not book.rungs_ended
        assert number < 2 or book.ask() is None, "the target is not asked for while a rung runs"
        book.end(number, "finished" if number else "diverged", "", value=5.0 - number)
        book.close()
    with pytest.raises(ConfigError, match=r"no forecast, so no target is trained: .* 2 rungs"):
        drive(ladder, silent)
    state = state_of(ladder)
    assert (state.status, len(state.trials), state.forecast) == ("failed", 3, None)


def test_a_damaged_forecast_is_reported_and_ignored(tmp_path: Path) -> None:
    ladder = make(tmp_path)
    fields: dict[str, Any] = dict.fromkeys(("ladder", "objective", "law", "why"), "x")
    fields |= {"constants": {}, "rungs": [], "target": {}, "held_out": {}, "curve": [], "scores": {}}
    with JournalWriter(ladder, FLOW_WRITER) as journal:
        journal.append("forecast_made", **fields, loss={"value": "low"}, coverage=0.95)
    state = state_of(ladder)
    assert state.forecast is None
    assert state.warnings
    assert "forecast_made" in state.warnings[0]


def test_bad_input_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--runs-dir", str(tmp_path / "runs")]
    for arguments, message in (
        (["ladder.sizes=[2]"], "error: ladder.sizes=[2]: 1 rungs"),
        (["ladder.sizes=[1,2,3]", "sweep.objective=loss@tokens=1K"], "the final value of a loss"),
        (["ladder.sizes=[1,2,3]", "ladder.batch=[1,2,0]"], "ladder.batch[2]=0: must be greater than 0"),
        (["--json"], "--json: prints the plan"),
        (["--target", "l"], "--target=l: the ladder has fixed its target"),
    ):
        assert main(["ladder", *here, *SMALL[:-1], "eval.enabled=true", *arguments]) == 10, arguments
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_plan_prices_all_rungs_and_the_target_and_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ladder", "--plan", "--json", "--runs-dir", str(tmp_path / "runs"), *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [rung["run"] for rung in plan["rungs"]] == ["rung 0", "rung 1", "rung 2"]
    assert plan["target"]["tokens"] == 200_704
    assert plan["plan"]["trials"] == 3
    assert main(["ladder", "--plan", "--runs-dir", str(tmp_path / "runs"), *SMALL]) == 0
    captured = capsys.readouterr()
    assert "target" in captured.out
    assert "3 rungs: 3 trials" in captured.err
    assert not (tmp_path / "runs").exists()
