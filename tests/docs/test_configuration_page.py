"""The example of docs/configuration.md works as written, and its run needs the folder no more."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from conf.of_run import of_run
from flows.sweep.report import build
from hlatctl.cli.main import main
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import list_runs, list_sweeps
from tests.docs.pages import DOCS, shown_files

PAGE = DOCS / "configuration.md"
FILES = shown_files(PAGE)
(COMMANDS,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's folder, as the working directory. Nothing asks a server of Prefect."""
    monkeypatch.delenv("HLATCTL_RUNS_DIR", raising=False)
    monkeypatch.setattr("flows.tracking.prefect_flow.begin", lambda *_: None)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.processes
def test_the_example_runs_as_written(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(FILES) == 4
    for line in COMMANDS.splitlines():
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    (run, *trials) = list_runs(project / "project-runs")
    assert len(trials) == 3
    mine = str(project / "conf" / "experiment" / "annealed.yaml")
    record = files.read_json(run.provenance)["origins"]
    assert record["keys"]["train.tokens"] == mine
    assert set(record["files"]) == {str(project / name) for name in FILES if "sweep" not in name}
    assert not run.origins.exists()
    monkeypatch.chdir(project.parent)
    (sweep,) = list_sweeps(project / "project-runs")
    build(sweep)
    assert "experiment_name: annealed" in sweep.best.read_text()
    _needs_the_folder_no_more(run, project, capsys)


def _needs_the_folder_no_more(run: RunPaths, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(project / "conf")
    where = ("--runs-dir", str(project / "project-runs"))
    assert main(["resume", run.run_id, "train.tokens=600K", *where]) == 0, capsys.readouterr().err
    config = of_run(run)
    assert (config.train.tokens, config.optimizer.weight_decay, config.checkpoint.every_steps) == (600_000, 0.01, 25)
    capsys.readouterr()
    assert main(["show", run.run_id, "--origins", "--json", *where]) == 0
    shown = json.loads(capsys.readouterr().out)["origins"]
    assert shown["train.tokens"] == {"value": 600_000, "origin": "amendment 1"}
    assert shown["optimizer.weight_decay"]["origin"] == str(project / "conf" / "optimizer" / "gentle.yaml")
    assert shown["cluster.launcher"]["origin"] == "command line"
    assert shown["runs_mode"]["origin"] == "default"
