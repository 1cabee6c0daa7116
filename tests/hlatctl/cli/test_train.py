"""`train`, `plan`, `resume` and `stop` on the simulated cluster without Prefect and MLflow, and progress."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conf.load
from conf import simulation
from conf.schema import ClusterConfig, Config
from hlatctl.cli.main import main
from hlatctl.cli.progress import LiveObserver, PlainObserver, describe, observer_for
from hlatctl.driver_job import DriverJob
from hlatctl.report.run_view import view_run
from hlatctl.run.errors import RunBusyError, StoppedError, TrainingError
from hlatctl.run.fold import fold, read_state
from hlatctl.run.journal import JournalWriter, read_events
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from tests.hlatctl.cli.conftest import FakeSlurm
from tests.hlatctl.conftest import MakeRun, example_config
from tests.waiting import WAIT_S


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def states(run: RunPaths) -> list[RunState]:
    events = read_events(run)
    return [fold(events[:end]) for end in range(1, len(events) + 1)]


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    return make_run(until="killed")


@pytest.fixture
def config(run: RunPaths) -> Config:
    return conf.load.load(run.config)


def test_the_line_names_step_tokens_loss_speed_time_left_and_the_next_milestone(run: RunPaths, config: Config) -> None:
    state = fold(read_events(run))
    assert describe(state, config) == (
        "step 130/306 · 1.06M tokens · loss 3.757 · 16.4K tok/s · 1 min 28 s left · milestone at 1.67M"
    )


def test_before_the_first_step_the_line_names_the_stage(run: RunPaths, config: Config) -> None:
    lines = [describe(state, config) for state in states(run)]
    for expected in ("starting", "data", "compile", "training, attempt 1: no step yet"):
        assert expected in lines


def test_an_evaluation_that_runs_is_named(run: RunPaths, config: Config) -> None:
    assert any("evaluating 833.3K" in describe(state, config) for state in states(run))


def test_plain_lines_come_at_every_tenth_and_not_at_every_step(
    run: RunPaths, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    stream = io.StringIO()
    observer = PlainObserver(stream)
    for state in states(run):
        observer.update(state, config)
        observer.update(state, config)
    steps = [line.split(" ")[1] for line in stream.getvalue().splitlines()]
    assert steps == ["1/306", "31/306", "62/306", "92/306", "123/306"]


def test_plain_lines_come_every_ten_seconds_of_a_slow_run(
    config: Config, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    stream = io.StringIO()
    observer = PlainObserver(stream)
    for state in states(run)[-130:]:
        now_s[0] += 1.0
        observer.update(state, config)
    assert 12 <= len(stream.getvalue().splitlines()) <= 17


def test_a_pipe_gets_plain_lines_and_a_terminal_a_live_one(
    run: RunPaths, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipe, terminal = io.StringIO(), Terminal()
    state = fold(read_events(run))
    for stream, kind in ((pipe, PlainObserver), (terminal, LiveObserver)):
        with observer_for(stream) as observer:
            assert isinstance(observer, kind)
            observer.message("data: done in 7.9 s [not markup]")
            observer.update(state, config)
        assert "data: done in 7.9 s [not markup]" in stream.getvalue()
        assert "130/306" in stream.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_no_color_is_honoured(run: RunPaths, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = r"\x1b\[[0-9;]*3[0-9]"

    def shown() -> str:
        terminal = Terminal()
        with observer_for(terminal) as observer:
            observer.update(fold(read_events(run)), config)
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(coloured, shown())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(coloured, shown())


def test_a_state_without_numbers_has_a_line_too() -> None:
    config = example_config(Path("/runs"))
    step = {"kind": "step", "step": 1, "tokens": 8192, "seq": 1, "time_unix_s": 1.0, "attempt": 1, "loss": "nan"}
    assert describe(fold([step]), config) == "step 1/306 · 8.19K tokens · loss nan · milestone at 833.3K"


OVERRIDES = ["tracking=none", "recovery.backoff_s=0", "train.global_batch_size=16", "checkpoint.every_steps=50"]
#: `python -m hlatctl` in another process, without Prefect there too.
DRIVER = """
import sys
import flows.tracking.prefect_flow
from hlatctl.cli.main import main
from hlatctl.report.run_view import view_run
flows.tracking.prefect_flow.begin = lambda *_: None
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def _without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.tracking.prefect_flow.begin", lambda *_: None)


@pytest.mark.processes
def test_a_dry_run_prints_its_id_alone_and_talks_on_stderr(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--run-id", "rehearsal", *OVERRIDES, "simulation.seed=5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "rehearsal\n"
    assert captured.err.splitlines()[0] == "SIMULATED: nothing is trained, and every number is made up"
    assert "SIMULATED · step 306/306" in captured.err
    assert "rehearsal: finished  SIMULATED: nothing was trained" in captured.err
    assert os.fspath(runs_dir / "rehearsal" / "report" / "index.html") in captured.err
    view = view_run(RunPaths(runs_dir / "rehearsal"))
    assert (view.status, view.state.step, view.state.simulated) == ("finished", 306, True)
    assert simulation.of_run(view.run).seed == 5
    # An id is given once, and the run that has it is not touched.
    assert main(["train", "--dry-run", "--run-id", "rehearsal", *OVERRIDES]) == 12
    assert "hlatctl resume rehearsal" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked", [["experiment=hlat_7b"], ["cluster=simulated"], ["cluster.launcher=simulated", "--detach"]]
)
def test_only_an_explicit_dry_run_simulates(
    asked: list[str], runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *asked]) == 10
    captured = capsys.readouterr()
    assert captured.out == ""
    error, hint = captured.err.splitlines()
    assert error.startswith(
        "error: cluster.launcher=simulated: simulates jobs and starts none, so nothing would be trained"
    )
    assert hint == "hint: add --dry-run to simulate it, or run `hlatctl plan` with the same configuration"
    assert not runs_dir.exists()


@pytest.mark.processes
def test_commands_that_continue_a_simulated_run_announce_it_first(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", "--run-id", "played", *OVERRIDES]) == 0
    capsys.readouterr()
    for argv in (["resume"], ["eval"], ["checkpoint", "ls"], ["checkpoint", "verify"], ["show"]):
        assert main([*argv, "played"]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "SIMULATED: nothing is trained, and every number is made up", argv
    for argv in (["runs"], ["status", "played"], ["goodput", "played"]):
        assert main(argv) == 0
        assert "SIMULATED" in capsys.readouterr().out, argv
    make_run("real", until="killed")
    assert main(["show", "real"]) == 0
    assert "SIMULATED" not in capsys.readouterr().err


@pytest.mark.processes
def test_resuming_a_finished_run_prints_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--run-id", "done", *OVERRIDES]) == 0
    capsys.readouterr()
    assert main(["resume", "latest"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "done\n"
    assert "done: finished" in captured.err
    assert main(["stop", "done"]) == 0
    assert capsys.readouterr().err == "done: is already finished\n"


def test_a_run_that_another_process_drives_is_left_alone(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(until="killed")
    with hold_driver(run):
        assert main(["resume", "example"]) == RunBusyError.exit_code
    assert (
        f"process {os.getpid()} is already driving it\nhint: `hlatctl status example` shows the run's state\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("error", "word"), [(StoppedError("run x: stopped"), "stopped"), (TrainingError("gave up"), "error")]
)
def test_a_run_that_ends_early_prints_how_to_continue(
    error: StoppedError | TrainingError,
    word: str,
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(until="killed")

    def drive(run: RunPaths, observer: object) -> None:
        raise error

    monkeypatch.setattr("flows.pretrain.drive", drive)
    assert main(["resume", "example"]) == error.exit_code
    assert capsys.readouterr().err.endswith(
        f"{word}: {error.message}\nhint: `hlatctl resume example` continues the run\n"
    )


@pytest.mark.processes
def test_plan_shows_everything_and_creates_nothing(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster.processes_per_node=2"]) == 0
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if line.startswith("# ")]
    assert titles == [
        "# memory, time and cost",
        "# the run",
        "# memory of a process",
        "# time of a step",
        "# cost, if nothing breaks",
        "# data, disk and tracking",
        "# evaluation of milestones",
        "# the corpus",
        "# stages",
        "# launch script of the first training attempt",
        "# Job train, written by hlatctl. May be run by hand to repeat it.",
        "# Writes train.pid first and train.exit_code last; SIGTERM asks the job to stop, SIGQUIT ends it at once.",
    ]
    assert main(["plan", "cluster.processes_per_node=2", "--config"]) == 0
    assert "\n# configuration\nexperiment_name: quickstart\n" in capsys.readouterr().out
    assert main(["plan", "cluster.processes_per_node=2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["cluster"]["processes_per_node"] == 2
    assert [stage["name"] for stage in record["stages"]][-3:] == ["train", "evaluate", "report"]
    assert record["budget"]["parameters"] == 2_901_120
    assert record["launch_script"].startswith("#!/bin/sh\n")
    assert record["simulated"] is False
    assert not runs_dir.exists()


def test_plan_marks_configurations_that_can_only_be_simulated_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=hlat_7b"]) == 0
    assert capsys.readouterr().out.startswith(
        "# simulation only\nSIMULATED: cluster.launcher=simulated starts no jobs."
    )


@pytest.mark.processes
def test_a_detached_run_continues_after_its_command_has_returned(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, started = subprocess.Popen, []

    def without_prefect(argv: list[str], **how: Any) -> subprocess.Popen[bytes]:
        assert argv[:4] == [sys.executable, "-P", "-m", "hlatctl"]
        started.append(popen([*argv[:2], "-c", DRIVER, *argv[4:]], **how))
        return started[0]

    monkeypatch.setattr("subprocess.Popen", without_prefect)
    assert main(["train", "--dry-run", "--detach", "--run-id", "away", *OVERRIDES]) == 0
    captured = capsys.readouterr()
    assert captured.out == "away\n"
    assert f"the run's driver is process {started[0].pid};" in captured.err
    assert started[0].wait(WAIT_S) == 0
    run = RunPaths(runs_dir / "away")
    assert view_run(run).status == "finished"
    assert "away: finished" in (run.root / "logs" / "head.log").read_text(encoding="utf-8")


def test_stopping_a_run_whose_job_may_run_without_a_driver_asks_the_job(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(until="killed")
    with JournalWriter(run, "flow", attempt=1) as journal:
        journal.append("run_finished", outcome="stopped", message="its driver was terminated")
    assert main(["stop", "example", "--wait", "1"]) == 0
    assert [event["kind"] for event in read_events(run) if event["writer"] == "operator"] == ["stop_requested"]
    assert "example: stopped at step 130; newest checkpoint: step 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--driver", "slurm"], "--driver=slurm: with cluster.launcher=local, the run's jobs would start inside"),
        (["--driver", "kubernetes"], "--driver=kubernetes: must be slurm\nhint: --detach runs the driver in the"),
        (["--driver", "nothing"], "--driver=nothing: must be slurm"),
        (["--driver", "slurm", "--detach"], "--driver=slurm: the driver can't also run here in the background"),
    ],
)
def test_a_driver_that_can_not_be_a_job_is_refused(
    words: list[str], message: str, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 10
    assert message in capsys.readouterr().err
    assert not runs_dir.exists()


@pytest.mark.processes
def test_a_job_that_waits_to_drive_a_run_is_shown_and_stopped(
    make_run: MakeRun, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(until="killed")
    DriverJob(launcher="slurm", token="t").write(run.driver_job)
    assert main(["status", "example"]) == 0
    shown = capsys.readouterr()
    assert "Slurm job 7 waits in the queue (Dependency)" in shown.out
    assert "hlatctl resume" not in shown.err
    assert main(["stop", "example", "--wait", "1"]) == 0
    assert slurm.cancelled[0] == "7"
    assert not run.driver_job.exists()


@pytest.mark.processes
def test_a_job_that_waits_to_evaluate_a_run_is_shown_and_stopped(
    make_run: MakeRun, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    DriverJob(launcher="slurm", token="t").write(run.evaluator_job)
    assert main(["status", "example"]) == 0
    assert "evaluation's job" in (shown := capsys.readouterr().out)
    assert "Slurm job 7 waits in the queue (Dependency)" in shown
    assert main(["stop", "example", "--wait", "1"]) == 0
    assert (slurm.cancelled, run.evaluator_job.exists()) == (["7"], False)
    assert "example: its evaluation is stopped; finished tasks are kept" in capsys.readouterr().err
    assert read_state(run).stop_by == "", "the run itself has finished"
    slurm.forget()
    DriverJob(launcher="slurm", token="t").write(run.evaluator_job)
    assert main(["status", "example"]) == 0
    assert "`hlatctl eval example --driver slurm` submits one" in capsys.readouterr().out


@pytest.mark.processes
def test_a_driver_here_cancels_the_job_that_waits(
    make_run: MakeRun, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(until="killed")
    DriverJob(launcher="slurm", token="t").write(run.driver_job)
    monkeypatch.setattr("flows.pretrain.drive", lambda run, observer: None)
    monkeypatch.setenv("HLATCTL_DRIVER_JOB", "t")
    assert main(["resume", "example"]) == 0
    assert run.driver_job.exists(), "the job itself drives the run"
    monkeypatch.delenv("HLATCTL_DRIVER_JOB")
    assert main(["resume", "example"]) == 0
    assert (slurm.cancelled, run.driver_job.exists()) == (["7"], False)
    assert "the jobs that were to drive it are cancelled" in capsys.readouterr().err


def test_no_job_drives_a_run_that_is_finished(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    submitted: list[RunPaths] = []
    monkeypatch.setattr("hlatctl.cli.train.submit_of", lambda cluster, name, detach: submitted.append)
    monkeypatch.setattr("flows.control.next_attempt", lambda state, config: None)
    assert main(["resume", "example", "--driver", "slurm"]) == 0
    assert (submitted, "run example is finished" in capsys.readouterr().err) == ([], True)
    with JournalWriter(run, "operator") as journal:
        journal.append("archived", bytes=1, by="ada")
    assert main(["resume", "example", "--driver", "slurm"]) == 22


@pytest.mark.processes
def test_the_job_of_a_driver_has_the_settings_that_resume_changes(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(until="killed")
    checked: list[ClusterConfig] = []
    monkeypatch.setattr("hlatctl.cli.train.submit_of", lambda cluster, name, detach: checked.append(cluster))
    monkeypatch.setattr("flows.pretrain.drive", lambda run, observer: None)
    assert main(["resume", "example", "--driver", "slurm", "cluster.slurm.driver.partition=long"]) == 0
    assert [cluster.slurm.driver.partition for cluster in checked] == ["long"]


@pytest.mark.processes
def test_a_rest_that_is_not_confirmed_changes_nothing(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(until="stages")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    price = ["cluster.price_usd_per_node_hour=1e9", "cluster.confirm_above_usd=1"]
    assert main(["resume", "example", *price]) == 10
    assert "that must be confirmed" in capsys.readouterr().err
    assert not [event for event in read_events(run) if event["kind"] == "config_amended"]
