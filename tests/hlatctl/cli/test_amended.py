"""What `status`, `show`, `diff` and `plan` say of amendments."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hlatctl.cli.main import main
from hlatctl.report.build import build
from hlatctl.report.figures.figure import AMENDED
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun

Text = Callable[..., str]


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    """A finished run with two amendments: one is in force from step 131 on, one waits."""
    run = make_run("example")
    with JournalWriter(run, OPERATOR_WRITER) as journal:
        changes = {"optimizer.lr": [0.003, 0.001]}
        journal.append("config_amended", number=1, changes=changes, by="ana", why="spikes", at_step=None)
        journal.append("config_amended", number=2, changes={"checkpoint.keep": [3, 9]}, by="ana", why="", at_step=500)
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("amendment_applied", number=1, step=130)
    return run


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> Text:
    def call(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return call


def test_status_names_the_newest_amendment_and_those_that_wait(run: RunPaths, text: Text) -> None:
    rows = dict(line.split("  ", 1) for line in text("status", "example").splitlines())
    assert rows["amendment 2"].strip() == "pending, after step 500: checkpoint.keep 3 -> 9"
    assert "amendment 1" not in rows


def test_show_prints_the_configuration_now_or_as_it_was(run: RunPaths, text: Text) -> None:
    now, created = text("show", "example"), text("show", "example", "--created")
    row = next(line for line in now.splitlines() if line.startswith("# 1 "))
    assert row.split()[-7:] == ["from", "step", "131", "optimizer.lr", "0.003", "0.001", "spikes"]
    assert ("  lr: 0.001\n" in now, "  lr: 0.003\n" in created) == (True, True)
    record = json.loads(text("show", "example", "--json"))
    assert (record["config"]["checkpoint"]["keep"], len(record["amendments"])) == (9, 2)


def test_diff_of_one_run_shows_what_was_amended(run: RunPaths, text: Text) -> None:
    assert [line.split() for line in text("diff", "example").splitlines()] == [
        ["KEY", "CREATED", "NOW"],
        ["optimizer.lr", "0.003", "0.001"],
        ["checkpoint.keep", "3", "9"],
    ]


@pytest.mark.processes
def test_plan_of_a_run_shows_what_a_change_would_do(run: RunPaths, text: Text) -> None:
    plan = text("plan", "--of", "example", "train.tokens=5M", "model.vocab_size=9000")
    changed = next(line for line in plan.splitlines() if line.startswith("model.vocab_size"))
    assert changed.split()[1:4] == ["8192", "9000", "never"]
    assert "jumps up from" in plan
    assert "# learning rate: * with the changes, . without" in plan


def test_the_report_has_a_table_of_amendments_and_a_line_in_each_figure(run: RunPaths) -> None:
    page = build(run).read_text(encoding="utf-8")
    assert "<h2>Amendments</h2>" in page
    assert "numbered green lines are amendments" in page
    for name in ("loss", "learning_rate", "throughput"):
        assert AMENDED in (run.report / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert "| 1 |" in (run.report / "summary.md").read_text(encoding="utf-8")


def test_an_amendment_after_the_last_step_says_that_it_has_no_effect(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("ended")
    monkeypatch.setattr("flows.amendments._check_like_new", lambda *of_it: None)
    assert main(["amend", "ended", "optimizer.momentum=0.9"]) == 0
    said = capsys.readouterr().err
    assert "optimizer.momentum: 0.95 -> 0.9\n" in said
    assert "warning: optimizer.momentum: has no effect without optimizer=muon\n" in said
    assert "training ended with step 306: this has an effect only if a larger train.tokens or train.max_steps " in said
    assert "none" not in said
