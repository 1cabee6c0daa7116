"""What `drill` refuses before anything is made, and its exit code. Real drills are in tests/e2e."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hlatctl.cli.drill import show
from hlatctl.cli.main import main
from hlatctl.run.errors import TrainingError
from hlatctl.run.journal import DRILL_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fault", "kill_hed"], "--fault=kill_hed: no such fault\nhint: did you mean kill_head? known: kill_process"),
        (["cluster=mock"], "cluster.launcher=mock: a drill disturbs real processes"),
        (["cluster=kubernetes"], "cluster.launcher=kubernetes: a drill disturbs real processes"),
        (
            ["--fault", "trackers_down", "--fault", "slow_process", "tracking=none", "cluster.processes_per_node=1"],
            "--fault=trackers_down: can't be injected, tracking.enabled=false\nhint: choose other faults with --fault",
        ),
        (["train.tokenz=3"], "train.tokenz: unknown key"),
    ],
)
def test_a_drill_that_can_not_run_is_refused_before_anything_is_created(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", f"runs_dir={tmp_path / 'runs'}", *argv]) == 10
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_recovery_that_failed_is_an_error_which_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunPaths(tmp_path / "drilled")
    with JournalWriter(run, DRILL_WRITER) as journal:
        journal.append("drill_outcome", fault="kill_head", title="kill -9 of the head", failure="no head", skipped="")
    with pytest.raises(TrainingError, match="the run did not recover from: kill -9 of the head") as caught:
        show(run, as_json=False)
    assert os.fspath(tmp_path) in caught.value.hint
    assert "NOT RECOVERED: no head" in capsys.readouterr().out


def test_an_interrupted_drill_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> RunPaths:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.drill.exercise.exercise", interrupted)
    assert main(["drill", f"runs_dir={tmp_path}"]) == 0
    assert "stopped: the drill was interrupted; its files are in " in capsys.readouterr().err
