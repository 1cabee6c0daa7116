"""`hlatctl report` and `goodput`: the formats, the folder, what they print, and what can't be reported."""

from __future__ import annotations

import json
import os
import webbrowser
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


def test_every_format_is_written_to_the_named_folder_only(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = make_run(), tmp_path / "paper"
    formats = [f"--format={name}" for name in ("html", "svg", "png", "pdf", "csv", "tex")]
    assert main(["report", "example", *formats, f"--output={folder}", f"--runs-dir={run.root.parent}"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "index.html")
    loss = sorted(path.suffix for path in (folder / "figures").glob("loss.*"))
    assert loss == [".csv", ".pdf", ".png", ".svg"]
    tables = {path.stem for path in (folder / "tables").iterdir()}
    assert {"summary", "scores", "milestones", "time", "incidents"} <= tables
    assert "smoke\\_mmlu" in (folder / "tables" / "scores.tex").read_text(encoding="utf-8")
    assert not run.report.exists()


def test_the_default_is_the_page_with_figures_and_their_data(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert main(["report", "example", f"--runs-dir={run.root.parent}"]) == 0
    assert capsys.readouterr().out.strip() == str(run.report / "index.html")
    assert {path.suffix for path in (run.report / "figures").iterdir()} == {".svg", ".csv"}


def test_open_shows_the_page_or_names_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    opened: list[str] = []

    def no_browser(url: str) -> bool:
        opened.append(url)
        return False

    monkeypatch.setattr(webbrowser, "open", no_browser)
    assert main(["report", "example", "--format=tex", "--open", f"--runs-dir={run.root.parent}"]) == 0
    page = run.report / "index.html"
    assert opened == [page.as_uri()]
    assert f"no browser was found; open {page}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = make_run(), tmp_path / "file"
    file.touch()
    assert main(["report", "example", "--format=csv", f"--output={file}", f"--runs-dir={run.root.parent}"]) != 0
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "bug in hlatctl" not in error


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "example", "--output", ""],
        ["eval", "data", "download", "--to", ""],
        ["cache", "gc", "", "--dry-run"],
        ["cache", "import", "graphs.tar.zst", "--to", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 10
    assert "hint: name a file or folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_format_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "x", "--format=docx"]) == 2
    assert "docx" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "checkpoints", "report/../journal"])
def test_a_report_is_not_written_among_a_runs_files(
    make_run: MakeRun, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    before = sorted(run.root.rglob("*"))
    assert main(["report", "example", f"--output={run.root / inside}", f"--runs-dir={run.root.parent}"]) == 10
    assert "is inside the run" in capsys.readouterr().err
    assert sorted(run.root.rglob("*")) == before


def test_a_page_that_is_not_a_report_is_kept(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, site = make_run(), tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("mine", encoding="utf-8")
    argv = ["report", "example", "--format=html", f"--runs-dir={run.root.parent}"]
    assert main([*argv, f"--output={site}"]) == 10
    assert f"hint: name a new folder: {site}/report" in capsys.readouterr().err
    assert (site / "index.html").read_text(encoding="utf-8") == "mine"
    for _ in range(2):  # a report may be replaced
        assert main([*argv, f"--output={site}/report"]) == 0
