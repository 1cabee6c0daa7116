"""The flow on the mock cluster: order, skipping, recovery, milestones, resume, and failure of a stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import Config
from flows import pretrain
from flows.context import FlowContext
from flows.launch import mock
from flows.launch.base import Job
from flows.pretrain import PlainCaller
from flows.stages.train import _attach, training_job
from hlatctl.run.errors import (
    ConfigError,
    EvaluationError,
    PreflightError,
    RunBusyError,
    RunExistsError,
    TrainingError,
    dump_error,
)
from hlatctl.run.journal import read_events
from hlatctl.run.lease import hold_head
from hlatctl.run.paths import RunPaths
from tests.flows.conftest import Recorder


@pytest.fixture(autouse=True)
def without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of stages is the same without Prefect; test_prefect_flow.py has it with."""
    monkeypatch.setattr("flows.prefect_flow.run_under_prefect", lambda ctx, pipeline: False)


def kinds(run: RunPaths, *names: str) -> list[str]:
    return [event["kind"] for event in read_events(run) if event["kind"] in names]


def stage_ends(run: RunPaths) -> list[tuple[str, str]]:
    return [
        (event["stage"], event["kind"].removeprefix("stage_"))
        for event in read_events(run)
        if event["kind"] in ("stage_finished", "stage_skipped", "stage_failed")
    ]


def test_a_dry_run_goes_through_every_stage_survives_a_kill_and_evaluates_every_milestone(
    mock_config: Config, recorder: Recorder
) -> None:
    run = pretrain.create(mock_config, argv=["hlatctl", "train"], simulated=True)
    state = pretrain.drive(run, recorder)
    assert [stage for stage, end in stage_ends(run)] == [
        "validate", "provenance", "preflight", "data", "compile", "warm_cache", "report",
    ]  # fmt: skip
    assert (state.status, state.simulated, state.step) == ("finished", True, mock_config.total_steps)
    assert [(a.cause, a.decision) for a in state.attempts] == [("killed", "restart"), ("finished", "done")]
    assert [m.status for m in state.milestones.values()] == ["evaluated"] * 3
    assert kinds(run, "milestone", "eval_finished").count("milestone") == 3
    assert "attempt 1: ended at step 153 (the job died of signal 9); restarting from step 150" in recorder.messages


def test_a_second_run_skips_what_the_first_prepared(mock_config: Config) -> None:
    for _ in range(2):
        run = pretrain.create(mock_config, argv=[])
        pretrain.drive(run)
    assert ("data", "skipped") in stage_ends(run)
    assert ("compile", "skipped") in stage_ends(run)


def test_a_finished_run_is_left_alone(mock_config: Config, recorder: Recorder) -> None:
    run = pretrain.create(mock_config, argv=[])
    pretrain.drive(run)
    before = len(read_events(run))
    pretrain.drive(run, recorder)
    assert len(read_events(run)) == before
    assert recorder.messages == [f"run {run.run_id} is finished"]


def test_a_failed_stage_ends_the_run_with_its_error_and_resume_goes_on(
    mock_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(run: RunPaths, config: Config, job: Job) -> int:
        dump_error(PreflightError("worker w7: clock skew 9 s, preflight.max_clock_skew_s=2"), job.error_file)
        return PreflightError.exit_code

    run = pretrain.create(mock_config, argv=[])
    with monkeypatch.context() as patch:
        patch.setitem(mock._PLAYS, "preflight", unfit)
        with pytest.raises(PreflightError, match="worker w7: clock skew 9 s"):
            pretrain.drive(run)
    assert kinds(run, "attempt_started") == []
    assert pretrain.drive(run).status == "finished"


def test_restarts_without_progress_are_bounded(mock_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mock._PLAYS, "train", lambda run, config, job: 137)
    run = pretrain.create(mock_config, argv=[])
    with pytest.raises(TrainingError, match="3 restarts in a row gained no checkpoint"):
        pretrain.drive(run)
    assert kinds(run, "attempt_started") == ["attempt_started"] * 4


def test_a_failing_evaluation_never_stops_training_and_is_tried_again_by_resume(
    mock_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretrain.create(mock_config, argv=[])
    with monkeypatch.context() as patch:
        patch.setitem(mock._PLAYS, "eval", lambda run, config, job: 1)
        with pytest.raises(EvaluationError, match="3 of 3 milestone evaluations failed; training is finished"):
            pretrain.drive(run)
    assert kinds(run, "eval_failed") == ["eval_failed"] * 6, "each milestone is tried twice"
    state = pretrain.drive(run)
    assert [m.status for m in state.milestones.values()] == ["evaluated"] * 3


def test_a_head_that_died_while_a_job_ran_re_attaches(mock_config: Config) -> None:
    run = pretrain.create(mock_config, argv=[])
    dead = FlowContext(run)
    dead.event("head_started", pid=1, host="gone")
    _attach(dead, training_job(mock_config, run, 1), 1)  # as far as submitting the first attempt
    dead.close()
    state = pretrain.drive(run)
    assert [attempt.number for attempt in state.attempts] == [1, 2], "attempt 1 was judged, not started again"
    assert state.status == "finished"


def test_two_heads_never_drive_one_run(mock_config: Config) -> None:
    run = pretrain.create(mock_config, argv=[])
    with hold_head(run), pytest.raises(RunBusyError, match="drives it already"):
        pretrain.drive(run)


def test_nothing_is_made_for_bad_input(mock_config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run-id=\.\./x: must be"):
        pretrain.create(mock_config, argv=[], run_id="../x")
    assert not (tmp_path / "runs").exists()
    pretrain.create(mock_config, argv=[], run_id="taken")
    with pytest.raises(RunExistsError, match="--run-id=taken: exists"):
        pretrain.create(mock_config, argv=[], run_id="taken")


def test_the_plain_caller_returns_what_a_stage_returns() -> None:
    caller = PlainCaller()
    assert caller.call("x", lambda: 1) == 1
    assert caller.submit("y", lambda: 2).result(timeout=5) == 2
