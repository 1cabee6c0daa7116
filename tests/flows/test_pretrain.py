"""The flow on the simulated cluster: order, skipping, recovery, milestones, resume, and failure of a stage."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from conf.schema import BudgetConfig, Config, SimulationConfig
from flows import pretrain
from flows.amendments import amend
from flows.control import request_stop
from flows.launch.base import Allocation, Job
from flows.pretrain import PlainCaller
from flows.recovery import node_ledger
from flows.runtime.context import FlowContext, open_context
from flows.runtime.driver import RealClock
from flows.simulation.cluster import START_UNIX_S, Script, SimulatedCluster, SimulatedLauncher
from flows.simulation.jobs import SCRIPTS, argument
from flows.stages.attempt import Attempt
from flows.tracking import links, prefect_api, prefect_flow
from hlatctl.report.numbers import node_hours
from hlatctl.run import files
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.errors import (
    BudgetError,
    ConfigError,
    DataError,
    EvaluationError,
    PreflightError,
    RunBusyError,
    RunExistsError,
    StoppedError,
    TrainingError,
    dump_error,
)
from hlatctl.run.fold import read_state
from hlatctl.run.journal import read_events, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths, nodes_file
from tests.flows.conftest import Recorder
from tests.waiting import WAIT_S

pytestmark = pytest.mark.processes

BEFORE_TRAINING = ["validate", "provenance", "data", "preflight", "compile", "warm_cache", "coverage"]


def kinds(run: RunPaths, *names: str) -> list[str]:
    return [event["kind"] for event in read_events(run) if event["kind"] in names]


def stage_ends(run: RunPaths) -> list[tuple[str, str]]:
    return [
        (event["stage"], event["kind"].removeprefix("stage_"))
        for event in read_events(run)
        if event["kind"] in ("stage_finished", "stage_skipped", "stage_failed")
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_waits_for_prefect_only_at_its_end_and_not_if_it_failed(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    ended, joined = threading.Event(), list[float]()
    monkeypatch.setattr(prefect_api, "begin", lambda *_, **__: True)
    monkeypatch.setattr(prefect_api, "connect", lambda *_: ended.wait(WAIT_S))  # a server that is not up yet
    monkeypatch.setattr(prefect_flow.PrefectView, "_run_flow", lambda self: None)
    finish = prefect_flow.PrefectView.finish

    def finished(view: prefect_flow.PrefectView, timeout_s: float) -> None:
        assert read_state(run).status == ("failed" if fails else "finished")
        joined.append(timeout_s)
        if not fails:
            ended.set()
        finish(view, WAIT_S)

    monkeypatch.setattr(prefect_flow.PrefectView, "finish", finished)
    if fails:
        monkeypatch.setattr("flows.pretrain.prepare_data", lambda ctx: (_ for _ in ()).throw(DataError("no corpus")))
    run = pretrain.create(simulated_config, argv=[])
    with pytest.raises(DataError, match="no corpus") if fails else nullcontext():
        pretrain.drive(run)
    assert joined == [simulated_config.tracking.final_sync_timeout_s] * len(joined) != []
    assert links.is_missed(run) == fails, "what Prefect has not got is copied later"
    ended.set()


def test_a_dry_run_runs_every_stage_survives_a_kill_and_evaluates_every_milestone(
    simulated_config: Config, recorder: Recorder
) -> None:
    run = pretrain.create(simulated_config, argv=["hlatctl", "train"])
    state = pretrain.drive(run, recorder)
    assert [stage for stage, end in stage_ends(run)] == [*BEFORE_TRAINING, "report"]
    assert (state.status, state.simulated, state.step) == ("finished", True, simulated_config.total_steps)
    assert [(a.cause, a.decision) for a in state.attempts] == [("killed", "restart"), ("finished", "done")]
    recovery = state.attempts[1].recovery
    assert (recovery["cause"], recovery["warm"]) == ("killed", False)
    assert recovery["start_s"] + recovery["groups_s"] == pytest.approx(SimulationConfig().start_s, abs=1.0)
    assert [m.status for m in state.milestones.values()] == ["evaluated"] * 3
    assert kinds(run, "milestone", "eval_finished").count("milestone") == 3
    assert "attempt 1: ended at step 153 (the job died of signal 9); restarting from step 150" in recorder.messages


def test_a_used_up_budget_stops_the_run_with_a_checkpoint_until_it_is_raised(
    simulated_config: Config, recorder: Recorder
) -> None:
    # The first run fills the caches that the others share.
    whole = [pretrain.drive(pretrain.create(simulated_config, argv=[])) for _ in range(2)][-1]
    used = node_hours(whole, simulated_config)
    config = dataclasses.replace(simulated_config, budget=BudgetConfig(node_hours=0.8 * used))
    run = pretrain.create(config, argv=[])
    with pytest.raises(BudgetError, match=r"budget.node_hours=\S+: \S+ node-hours are used, 10\d %") as caught:
        pretrain.drive(run, recorder)
    assert caught.value.hint.startswith(f"`hlatctl resume {run.run_id} budget.node_hours=VALUE`")
    state = read_state(run)
    assert (state.status, state.attempts[-1].cause, state.holds_nodes) == ("stopped", "budget", False)
    assert 0 < state.checkpoints[-1] == state.step < config.total_steps
    assert [event["what"] for event in read_events(run) if event["kind"] == "alarm"] == ["budget"]
    with pytest.raises(BudgetError):
        pretrain.drive(run)
    assert read_state(run).last_event_unix_s == state.last_event_unix_s, "nothing was started"
    amend(run, [f"budget.node_hours={used * 2}"], by="me", why="")
    assert pretrain.drive(run).status == "finished"


def test_driving_a_finished_run_changes_nothing_and_a_second_run_skips_what_it_prepared(
    simulated_config: Config, recorder: Recorder
) -> None:
    run, second = (pretrain.create(simulated_config, argv=[]) for _ in range(2))
    pretrain.drive(run)
    before = len(read_events(run))
    pretrain.drive(run, recorder)
    assert len(read_events(run)) == before
    assert recorder.messages == [f"run {run.run_id} is finished"]
    pretrain.drive(second)
    assert {("data", "skipped"), ("compile", "skipped")} <= set(stage_ends(second))


def test_a_failed_stage_ends_the_run_with_its_error_and_resume_continues(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(cluster: SimulatedCluster, job: Job) -> Script:
        yield 1.0
        dump_error(PreflightError("worker w7: clock skew 9 s, preflight.max_clock_skew_s=2"), job.error_file)
        return PreflightError.exit_code

    run = pretrain.create(simulated_config, argv=[])
    with monkeypatch.context() as patch:
        patch.setitem(SCRIPTS, "preflight", unfit)
        with pytest.raises(PreflightError, match="worker w7: clock skew 9 s"):
            pretrain.drive(run)
    assert kinds(run, "attempt_started") == []
    assert pretrain.drive(run).status == "finished"


@pytest.mark.parametrize(("asked_before", "code"), [(False, 0), (True, 130)])
def test_one_interrupt_is_a_request_and_a_second_one_stops_without_a_checkpoint(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, asked_before: bool, code: int
) -> None:
    def interrupt(ctx: FlowContext, caller: object) -> None:
        if asked_before:
            ctx.event("stop_requested", by="interrupt")
        raise KeyboardInterrupt

    run = pretrain.create(simulated_config, argv=[])
    monkeypatch.setattr(pretrain, "pipeline", interrupt)
    with pytest.raises(StoppedError) as stopped:
        pretrain.drive(run, caller_of=lambda ctx: PlainCaller(ctx.clock))
    assert stopped.value.exit_code == code
    assert ("without a checkpoint" in stopped.value.message) == asked_before
    assert stopped.value.hint == f"`hlatctl resume {run.run_id}` continues the run"


def test_restarts_without_progress_are_bounded(simulated_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter((137, 134, 139, 135, 137))
    monkeypatch.setitem(SCRIPTS, "train", lambda cluster, job: ends_with(next(codes)))
    run = pretrain.create(simulated_config, argv=[])
    with pytest.raises(TrainingError, match="3 restarts in a row made no new checkpoint"):
        pretrain.drive(run)
    assert kinds(run, "attempt_started") == ["attempt_started"] * 4


def ends_with(code: int) -> Script:
    yield 1.0
    return code


def dies_after_step_153(cluster: SimulatedCluster, job: Job) -> Script:
    """Simulate a later attempt that dies at the same step as the dry run's first one."""
    ceiling = int(argument(job, "--max-checkpoint-step")) if "--max-checkpoint-step" in job.argv else 10**9
    first = max(step for step in checkpoint_steps(cluster.run) if step <= ceiling)
    with cluster.journal(train_writer(0), int(argument(job, "--attempt"))) as journal:
        journal.append("train_started", resumed_from_step=first, tokens=first * cluster.config.tokens_per_step)
        for step in range(first + 1, 154):
            yield 1.0
            journal.append("step", step=step, tokens=step * cluster.config.tokens_per_step, loss=2.0, step_s=1.0)
    return 137


def test_the_same_failure_walks_back_then_stops_the_run_with_its_evidence(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    normal = SCRIPTS["train"]
    monkeypatch.setitem(
        SCRIPTS, "train", lambda cluster, job: (normal if "1" in job.argv else dies_after_step_153)(cluster, job)
    )
    run = pretrain.create(simulated_config, argv=[])
    with pytest.raises(TrainingError, match="died of signal 9; step 154 has failed 3 times in the same way") as caught:
        pretrain.drive(run, recorder)
    assert f"`hlatctl data skip {run.run_id} --steps 154`" in caught.value.hint
    started = [e["resumed_from_step"] for e in read_events(run) if e["kind"] == "train_started"]
    ended = [(e["decision"], e["max_checkpoint_step"]) for e in read_events(run) if e["kind"] == "attempt_ended"]
    assert started == [0, 150, 102]
    assert ended == [("restart", None), ("walk_back", 102), ("stop", 102)]
    assert any("walking back from checkpoint 150 to 102" in message for message in recorder.messages)

    monkeypatch.setitem(SCRIPTS, "train", normal)
    state = pretrain.drive(run)
    assert (state.status, state.attempts[3].resumed_from_step) == ("finished", 102), "the newer one stays behind"


@pytest.mark.parametrize("where", ["in the journal", "in the checkpoint"])
def test_a_batch_that_fails_twice_is_excluded_by_number(
    where: str, simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = SCRIPTS["train"]

    def bad_data(cluster: SimulatedCluster, job: Job) -> Script:
        if any(event["kind"] == "data_changed" for event in read_events(cluster.run)):
            return (yield from normal(cluster, job))
        code = yield from (normal if "1" in job.argv else dies_after_step_153)(cluster, job)
        if where == "in the journal":
            with cluster.journal(train_writer(0), 1) as journal:
                journal.append("step", step=150, tokens=150 * simulated_config.tokens_per_step, batch=152, step_s=1.0)
        else:
            files.write_json(cluster.run.checkpoint(150) / "ranks.json", {"loader": [[152, 0, 0]]})
        dump_error(DataError("part-00000.arrow: damaged"), job.error_file)
        return code

    monkeypatch.setitem(SCRIPTS, "train", bad_data)
    run = pretrain.create(simulated_config, argv=[])
    assert pretrain.drive(run).status == "finished"
    (changed,) = [event for event in read_events(run) if event["kind"] == "data_changed"]
    assert (changed["key"], changed["value"], changed["by"]) == ("data.skip_steps", [156], "recovery")
    assert changed["why"] == "step 154 has failed twice on its data: restarting from step 150 without batch 156"


def test_a_node_that_fails_repeatedly_is_left_out_if_another_can_replace_it(
    simulated_config: Config, recorder: Recorder
) -> None:
    config = dataclasses.replace(
        simulated_config, cluster=dataclasses.replace(simulated_config.cluster, nodes=2, processes_per_node=1)
    )
    run = pretrain.create(config, argv=[], simulated=SimulationConfig(spare_nodes=1))
    ledger = nodes_file(run.root)
    bad = node_ledger.Entry(time_unix_s=START_UNIX_S, host="simulated-0", kind="failure", run_id="earlier", attempt=1)
    node_ledger.record(ledger, [bad] * 4)
    assert pretrain.drive(run, recorder).status == "finished"
    assert {worker["host"] for worker in files.read_json(run.preflight)["workers"]} == {"simulated-1", "simulated-2"}
    left_out = [event["left_out_hosts"] for event in read_events(run) if event["kind"] == "attempt_started"]
    assert left_out == [["simulated-0"]] * 2
    assert "nodes: left out because of the node ledger: simulated-0" in recorder.messages
    passed = [entry.host for entry in node_ledger.read(ledger) if entry.kind == "preflight_passed"]
    assert passed == ["simulated-1", "simulated-2"]


def test_a_suspect_node_is_measured_again_before_the_next_attempt(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    codes = iter((137, 134))
    normal = SCRIPTS["train"]
    monkeypatch.setitem(
        SCRIPTS, "train", lambda cluster, job: ends_with(code) if (code := next(codes, 0)) else normal(cluster, job)
    )
    run = pretrain.create(simulated_config, argv=[])
    assert pretrain.drive(run, recorder).status == "finished"
    starts = [e for e in read_events(run) if e["kind"] == "attempt_started" or e.get("stage") == "preflight"]
    order = [event["kind"].removesuffix("_started") for event in starts if event["kind"].endswith("_started")]
    assert order == ["stage", "attempt", "attempt", "stage", "attempt"]
    assert "nodes: simulated-0 failed before; measuring again before the next attempt" in recorder.messages


def test_nodes_that_a_scheduler_gives_anew_are_measured_before_training(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    given, codes, normal = ["allocation-0001"], iter((137, 137)), SCRIPTS["train"]

    def train(cluster: SimulatedCluster, job: Job) -> Script:
        code = next(codes, 0)
        if job.launch_dir.name == "attempt-0002":
            given.append("allocation-0002")
        return ends_with(code) if code else normal(cluster, job)

    monkeypatch.setitem(SCRIPTS, "train", train)
    monkeypatch.setattr(SimulatedLauncher, "keeps_nodes", True)
    monkeypatch.setattr(
        SimulatedLauncher, "allocation", lambda *_: Allocation(name=given[-1], hosts=("simulated-0", "spare"))
    )
    run = pretrain.create(simulated_config, argv=[])
    assert pretrain.drive(run, recorder).status == "finished"
    starts = [e for e in read_events(run) if e["kind"] == "attempt_started" or e.get("stage") == "preflight"]
    order = [event["kind"].removesuffix("_started") for event in starts if event["kind"].endswith("_started")]
    assert order == ["stage", "attempt", "attempt", "stage", "attempt"], "a spare node replaces the suspect one"
    assert recorder.messages.count("nodes: measuring the nodes that training gets") == 1


def test_a_failing_evaluation_does_not_stop_training_and_resume_retries_it(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretrain.create(simulated_config, argv=[])
    with monkeypatch.context() as patch:
        patch.setitem(SCRIPTS, "eval", lambda cluster, job: ends_with(1))
        with pytest.raises(EvaluationError, match="3 of 3 milestone evaluations failed; training is finished"):
            pretrain.drive(run)
    assert kinds(run, "eval_failed") == ["eval_failed"] * 6, "each milestone is tried twice"
    state = pretrain.drive(run)
    assert [m.status for m in state.milestones.values()] == ["evaluated"] * 3


def test_after_a_driver_died_while_a_job_ran_the_next_one_re_attaches(simulated_config: Config) -> None:
    run = pretrain.create(simulated_config, argv=[])
    dead = open_context(run)
    dead.event("head_started", pid=1, host="gone")
    Attempt.start(dead, 1)
    dead.close()
    state = pretrain.drive(run)
    assert [attempt.number for attempt in state.attempts] == [1, 2], "attempt 1 was not started again"
    assert state.status == "finished"


def test_a_run_has_at_most_one_driver(simulated_config: Config) -> None:
    run = pretrain.create(simulated_config, argv=[])
    with hold_driver(run), pytest.raises(RunBusyError, match="is already driving it"):
        pretrain.drive(run)


def test_bad_input_creates_nothing(simulated_config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run-id=\.\./x: must be"):
        pretrain.create(simulated_config, argv=[], run_id="../x")
    assert not (tmp_path / "runs").exists()
    pretrain.create(simulated_config, argv=[], run_id="taken")
    with pytest.raises(RunExistsError, match="--run-id=taken: exists"):
        pretrain.create(simulated_config, argv=[], run_id="taken")


def test_the_plain_caller_returns_what_a_stage_returns() -> None:
    caller = PlainCaller(RealClock())
    assert caller.call("x", lambda: 1) == 1
    assert caller.submit(lambda: ("y", lambda: 2), most=1).result(timeout=WAIT_S) == 2


def test_a_stop_between_a_drivers_lock_and_its_first_event_is_obeyed(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, start = pretrain.create(simulated_config, argv=[]), pretrain._journal_start

    def asked_first(ctx: FlowContext) -> None:
        request_stop(run, by="ana", wait_s=0)
        start(ctx)

    monkeypatch.setattr(pretrain, "_journal_start", asked_first)
    with pytest.raises(StoppedError, match="stopped on request"):
        pretrain.drive(run, caller_of=lambda ctx: PlainCaller(ctx.clock))
    assert read_state(run).attempt is None
