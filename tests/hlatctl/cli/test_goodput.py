"""What `goodput` prints of a run with a known past."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from tests.hlatctl.conftest import MakeRun


def test_goodput_shows_how_the_time_was_spent(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    assert main(["goodput", "latest", "--runs-dir", os.fspath(tmp_path / "runs")]) == 0
    above, below = capsys.readouterr().out.split("\n\n")
    facts = {name: text.strip() for name, text in (line.split("  ", 1) for line in above.splitlines())}
    assert facts["run"] == "example"
    assert facts["goodput (ETTR)"].startswith("81.1 % (productive steps, of 3 min 6 s")
    assert facts["failures"] == "1 killed, in 2 min 50 s of training: one in 2 min 50 s"
    assert facts["checkpoint interval"] == "every 50 steps, 25 s"
    assert facts["best interval (Daly)"] == "every 9.0 s, 18 steps"
    lines = [line.split() for line in below.splitlines()]
    assert lines[0] == ["CATEGORY", "TIME", "SHARE"]
    assert ["restart:", "killed", "13", "s", "5.1", "%"] in lines
    assert lines[-1] == ["wall", "time", "4", "min", "16", "s", "100.0", "%"]


def test_goodput_as_json_adds_up(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(simulated=True)
    assert main(["goodput", "example", "--json", "--runs-dir", os.fspath(tmp_path / "runs")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["run_id"], record["simulated"]) == ("example", True)
    assert round(sum(record["seconds"].values()), 6) == round(record["wall_s"], 6)


@pytest.mark.parametrize("until", ["created", "stages", "killed"])
def test_a_run_under_way_has_a_ledger(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], until: str
) -> None:
    make_run(until=until)
    assert main(["goodput", "example", "--runs-dir", os.fspath(tmp_path / "runs")]) == 0
    assert ("goodput (ETTR)" in capsys.readouterr().out) == (until == "killed")


def test_a_damaged_configuration_is_an_error(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    run.config.write_text("train: 3\n", encoding="utf-8")
    assert main(["goodput", "example", "--runs-dir", os.fspath(tmp_path / "runs")]) == 10
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""
