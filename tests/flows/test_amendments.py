"""Amendments of a run: what is refused before anything is written, and how a run continues with them."""

from __future__ import annotations

import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

import conf.load
from conf.of_run import CONFIG_AMENDED, newest_amendment, of_run
from conf.schema import Config, SimulationConfig, StageConfig
from flows import amendments, pretrain
from flows.amendments import Amended
from flows.pretrain import PlainCaller
from flows.runtime import amended
from flows.runtime.amended import Orders
from flows.runtime.context import FlowContext, open_context
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, RunBusyError, StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, JournalWriter, read_events, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.flows.conftest import Recorder
from tests.waiting import WAIT_S

ARGV = ["hlatctl", "train", "--tag", "a=b", "--config-dir", "own", "optimizer.lr=0.008", "parallel=data"]


@pytest.fixture
def run(composed: Config, tmp_path: Path) -> RunPaths:
    """A run on this machine that has trained 70 of 306 steps, with a checkpoint of step 50; nothing runs."""
    cluster = dataclasses.replace(composed.cluster, launcher="local", processes_per_node=1)
    config = dataclasses.replace(composed, cluster=cluster, runs_dir=str(tmp_path))
    run = RunPaths(tmp_path / "run")
    run.root.mkdir(mode=0o700)
    files.write_text(run.config, files.seal_lines(conf.load.dump(config)))
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id="run", simulated=False, argv=ARGV)
        journal.attempt = 1
        journal.append("attempt_started", handle={"launcher": "local", "name": "train", "launch_dir": str(tmp_path)})
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("train_started", resumed_from_step=0, tokens=0)
        journal.append("checkpoint_committed", step=50, tokens=50 * 8192)
        journal.append("step", step=70, tokens=70 * 8192, loss=3.0)
    return run


def amend(run: RunPaths, *overrides: str, at: int | str | None = None) -> Amended:
    return amendments.amend(run, list(overrides), by="ana", why="because", at=at)


def events(run: RunPaths) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == CONFIG_AMENDED]


def test_an_amendment_is_journalled_with_old_and_new_values(run: RunPaths) -> None:
    made = amend(run, "optimizer.lr=1e-4", "train.tokens=3M")
    (event,) = events(run)
    assert event["changes"] == {"optimizer.lr": [8e-3, 1e-4], "train.tokens": [2_500_000, 3_000_000]}
    assert (event["number"], event["by"], event["why"], event["at_step"]) == (1, "ana", "because", None)
    assert (made.number, made.begins) == (1, "next_attempt")
    assert of_run(run) == made.after == conf.load.load(run.amended_config(1))
    assert run.amended_config(1).stat().st_mode & 0o077 == 0


def test_an_amendment_of_a_run_with_stages_must_have_an_effect_in_one_that_is_left(run: RunPaths) -> None:
    stages = [
        StageConfig(name="pre", tokens=60 * 8192),
        StageConfig(name="mid", tokens=60 * 8192, set={"optimizer.lr": 1e-3}),
        StageConfig(name="late", tokens=60 * 8192, set={"optimizer.weight_decay": 0.2}),
    ]
    before = of_run(run)
    staged = dataclasses.replace(before, train=dataclasses.replace(before.train, stages=stages))
    files.write_text(run.config, files.seal_lines(conf.load.dump(staged)))
    with pytest.raises(
        ConfigError, match=r"optimizer\.lr=0\.1: has no effect, because the stages that are left set it"
    ):
        amend(run, "optimizer.lr=0.1")
    with pytest.raises(ConfigError, match=r"train\.stages=\[\]: can't change in a run that exists"):
        amend(run, "train.stages=[]")
    amend(run, "optimizer.weight_decay=0.3")
    amend(run, "train.z_loss=1e-4")
    assert [(c.optimizer.weight_decay, c.train.z_loss) for c in (of_run(run).during(s) for s in (61, 121))] == [
        (0.3, 1e-4),
        (0.2, 1e-4),
    ]


def test_an_amendment_that_is_journalled_is_made_although_the_disk_has_no_room_for_its_file(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "config-1.yaml")

    with monkeypatch.context() as patch:
        patch.setattr(amendments, "write_amended", full)
        assert amend(run, "optimizer.lr=1e-4").number == 1
    assert not run.amended_config(1).exists()
    assert of_run(run).optimizer.lr == 1e-4


def test_values_that_the_run_has_already_change_nothing(run: RunPaths) -> None:
    assert amend(run, "optimizer.lr=0.008").number == 0
    assert amend(run, "optimizer.lr=0.001").number == 1
    assert amend(run, "optimizer.lr=1e-3").number == 0
    assert len(events(run)) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden_size=64", "model.hidden_size=64: can't change in a run that exists"),
        ("seed=1", "seed=1: can't change"),
        ("optimizer=muon", "optimizer.name=muon: can't change in a run that exists"),
        ("train.seq_len=256", "train.seq_len=256: can't change"),
        ("experiment=llama_1b", "experiment=llama_1b: belongs to a new run"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0: must be"),
        ("optimizer.rate=1", "optimizer.rate: unknown key"),
        ("train.micro_batch_size=3", "train.micro_batch_size=3"),
        ("train.max_steps=70", "train.max_steps=70: end after step 70, and the run has trained 70 steps"),
        ("precision=bf16_sr", "precision.name=bf16_sr: the checkpoints have the weights and moments of fp32"),
        ("cluster=simulated", "cluster.launcher=simulated: a run is simulated from its beginning or not at all"),
        ("cluster.nodes=2", "cluster.nodes=2: cluster.launcher=local runs on this machine only"),
        ("backend.env.HF_TOKEN=abc", "backend.env.HF_TOKEN: has the name of a secret"),
    ],
)
def test_what_a_run_cannot_continue_with_is_refused_before_anything_is_written(
    override: str, message: str, run: RunPaths
) -> None:
    before = sorted(path.name for path in run.root.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        amend(run, override)
    assert caught.value.message.startswith(message) or message in caught.value.message
    assert sorted(path.name for path in run.root.rglob("*")) == before


def hint_of(run: RunPaths, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        amend(run, *overrides)
    return caught.value.hint


def test_the_hint_of_a_refusal_is_the_command_that_does_it_in_a_new_run(run: RunPaths) -> None:
    amend(run, "optimizer.lr=1e-4", "checkpoint.fast_dir=null", "parallel.data_parallel=fsdp")
    like = "`hlatctl train --config-dir own optimizer.lr=0.0001 parallel=data parallel.data_parallel=fsdp"
    init = f"train.init_from={run.checkpoint(50)}` begins a new run with the weights alone"
    assert hint_of(run, "optimizer=muon") == f"{like} optimizer=muon {init}"
    assert hint_of(run, "precision=bf16_sr") == f"{like} precision=bf16_sr {init}"
    assert hint_of(run, "model.num_layers=3") == f"{like} model.num_layers=3` begins a new run"
    fork = "begins a new run from the newest checkpoint"
    assert hint_of(run, "seed=3") == f"`hlatctl fork run seed=3` {fork}"
    bigger = "`hlatctl fork run --restart-data train.global_batch_size=32`"
    assert hint_of(run, "train.global_batch_size=32") == f"{bigger} {fork}"
    assert hint_of(run, "data.skip_steps=[3]") == "`hlatctl data skip run --steps N`"
    assert "hlatctl fork run --at STEP" in hint_of(run, "fork.run=x")


def test_the_hint_about_a_fork_names_its_checkpoint_and_where_its_values_are(run: RunPaths) -> None:
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append(
            "run_created", run_id="run", simulated=False, argv=["hlatctl", "fork", "other", "optimizer.lr=1"]
        )
    init = f"train.init_from={run.checkpoint(50)}"
    shown = f"`hlatctl train` with optimizer=muon {init} and the values of `hlatctl show run`"
    assert hint_of(run, "optimizer=muon") == f"{shown} begins a new run with the weights alone"


def test_a_run_without_a_checkpoint_can_change_its_tensors_only_while_nothing_trains(run: RunPaths) -> None:
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("checkpoint_deleted", step=50)
    with hold_driver(run):
        hint = hint_of(run, "precision=bf16_sr")
        assert hint.startswith("`hlatctl train ")
        assert "init_from" not in hint, "there is no checkpoint"
    assert amend(run, "precision=bf16_sr").number == 1, "the next attempt begins with step 1"


def test_a_precision_with_the_same_tensors_can_follow(run: RunPaths) -> None:
    assert amend(run, "precision=mixed").changes == {"precision.name": ["fp32", "mixed"]}


def test_an_option_replaces_its_group_as_for_a_new_run(run: RunPaths) -> None:
    amend(run, "parallel.activation_checkpointing=full")
    made = amend(run, "parallel=fsdp")
    assert made.changes == {
        "parallel.data_parallel": ["replicate", "fsdp"],
        "parallel.activation_checkpointing": ["full", "none"],
    }


def test_a_step_must_lie_ahead(run: RunPaths) -> None:
    with pytest.raises(ConfigError, match="--at=70: is not after the newest step, 70"):
        amend(run, "optimizer.lr=1e-4", at="70")
    with pytest.raises(ConfigError, match="--at=soon: must be a step or `now`"):
        amend(run, "optimizer.lr=1e-4", at="soon")
    with pytest.raises(ConfigError, match=r"--at=90: checkpoint\.keep changes immediately"):
        amend(run, "checkpoint.keep=9", at="90")
    with pytest.raises(ConfigError, match="--at=306: training ends with step 306"):
        amend(run, "optimizer.lr=1e-4", at="306")
    assert amend(run, "optimizer.lr=1e-4", at="90").at_step == 90


def train(run: RunPaths, *steps: int, **fields: Any) -> None:
    with JournalWriter(run, train_writer(0), 1) as journal:
        for step in steps:
            journal.append("step", step=step, tokens=step * 8192, loss=3.0, **fields)


def test_a_step_that_passes_while_the_amendment_is_checked_is_refused(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.amendments.check", lambda *_, **__: train(run, 80, 95))
    with pytest.raises(ConfigError, match="--at=90: is not after the newest step, 95"):
        amend(run, "optimizer.lr=1e-4", at="90")
    assert not events(run)


def test_a_step_that_training_reaches_before_it_has_the_order_is_refused(run: RunPaths) -> None:
    train(run, *range(71, 80), step_s=0.5)
    with hold_driver(run):
        with pytest.raises(ConfigError, match="--at=89: is too soon; the run is at step 79") as caught:
            amend(run, "optimizer.lr=1e-4", at="89")
        assert caught.value.hint == "--at 209, or --at now"
        assert amend(run, "optimizer.lr=1e-4", at="209").at_step == 209


def test_an_amendment_that_begins_later_than_asked_for_says_so(run: RunPaths) -> None:
    amend(run, "optimizer.lr=1e-4", at="90")
    amend(run, "optimizer.lr=2e-4", at="now")
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("amendment_applied", number=1, step=97)
        journal.append("amendment_applied", number=2, step=97)
    late = "later than asked for: step 90 was over before the trainer had the order"
    assert [a.begins for a in read_state(run).amendments] == [f"from step 98 ({late})", "from step 98"]


def test_a_running_attempt_must_not_pass_an_earlier_end(run: RunPaths) -> None:
    with hold_driver(run):
        with pytest.raises(ConfigError, match="the running attempt could pass that step") as caught:
            amend(run, "train.max_steps=100")
        assert caught.value.hint == "--at now restarts training with the new end"
        with pytest.raises(ConfigError, match=r"data\.path=.*: is compared with the run's corpus first"):
            amend(run, f"data.path={run.config}")
    assert amend(run, "train.max_steps=100").number == 1


def test_amendments_begin_in_order_except_those_at_once(run: RunPaths) -> None:
    amend(run, "optimizer.lr=1e-4", at="90")
    with pytest.raises(ConfigError, match="amendment 1 waits for step 90") as caught:
        amend(run, "train.z_loss=1e-4")
    assert caught.value.hint == "--at 90 begins both there; --at now begins both now"
    assert amend(run, "checkpoint.keep=9").begins == "at_once"
    assert amend(run, at="now").changes == {}
    assert [event["at_step"] for event in events(run)] == [90, None, 50]


def test_there_is_nothing_to_begin_without_keys_and_without_waiting_amendments(run: RunPaths) -> None:
    assert amend(run, at="now").number == 0
    with pytest.raises(ConfigError, match="no key is given"):
        amend(run)


def test_two_operators_do_not_overwrite_each_other(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(config: Config, *, begun: bool = False) -> None:
        monkeypatch.undo()
        amend(run, "optimizer.lr=2e-4")

    monkeypatch.setattr("flows.amendments.check", meanwhile)
    with pytest.raises(RunBusyError, match="another amendment was made meanwhile"):
        amend(run, "optimizer.lr=1e-4")
    assert of_run(run).optimizer.lr == 2e-4
    with JournalWriter(run, OPERATOR_WRITER), pytest.raises(RunBusyError, match="another process is writing"):
        amend(run, "optimizer.lr=1e-4")


def test_a_kill_between_event_and_file_loses_nothing(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise StorageError("killed")

    monkeypatch.setattr("flows.amendments.write_amended", killed)
    with pytest.raises(StorageError, match="killed"):
        amend(run, "optimizer.lr=1e-4")
    monkeypatch.undo()
    assert (newest_amendment(run), of_run(run).optimizer.lr) == (1, 1e-4)
    assert amend(run, "optimizer.lr=2e-4").number == 2


def test_a_driver_takes_what_changes_at_once_and_orders_the_rest(run: RunPaths, recorder: Recorder) -> None:
    ctx = open_context(run, recorder)
    amended.adopt(ctx)
    attempt = ctx.state.attempts[-1]
    orders = Orders(run, attempt, ctx.clock)
    orders.give(ctx.state, ctx.config)
    assert not run.orders(1).exists()
    amend(run, "recovery.hang_floor_s=7", "checkpoint.keep=9")
    amend(run, "optimizer.lr=1e-4", at="90")
    ctx.refresh()
    amended.follow(ctx)
    orders.give(ctx.state, ctx.config)
    assert (ctx.config.recovery.hang_floor_s, ctx.config.checkpoint.keep, ctx.config.optimizer.lr) == (7, 9, 8e-3)
    assert files.read_json(run.orders(1)) == {
        "numbers": [1],
        "values": {"checkpoint.keep": 9},
        "end_after_step": 90,
        "profile": None,
    }
    ctx.close()


def test_a_waiting_evaluation_begins_as_soon_as_more_may_run_at_once(run: RunPaths, recorder: Recorder) -> None:
    ctx = open_context(run, recorder)
    amended.adopt(ctx)
    go, begun = threading.Event(), threading.Semaphore(0)

    def evaluate() -> None:
        begun.release()
        go.wait(WAIT_S)

    results = [ctx.clock.beside(evaluate, most=ctx.config.eval.concurrent) for _ in range(2)]
    assert begun.acquire(timeout=WAIT_S)
    amend(run, "eval.concurrent=2")
    ctx.refresh()
    amended.follow(ctx)
    assert begun.acquire(timeout=WAIT_S), "the second one begins while the first runs"
    go.set()
    assert [result.result(timeout=WAIT_S) for result in results] == [None, None]
    ctx.close()


def test_an_attempt_ends_at_its_next_milestone_that_is_not_evaluated_if_its_nodes_evaluate(run: RunPaths) -> None:
    ctx = open_context(run)
    amended.adopt(ctx)
    assert amended.pause_step(ctx.state, ctx.config) is None
    amend(run, "eval.enabled=true", "eval.every_tokens=409600", "eval.placement=between")
    ctx.refresh()
    amended.follow(ctx)
    start = ctx.state.attempts[-1].resumed_from_step or 0
    first, second, *_ = (step for step in sorted(ctx.config.milestones) if step > start)
    Orders(run, ctx.state.attempts[-1], ctx.clock).give(ctx.state, ctx.config)
    assert files.read_json(run.orders(1))["end_after_step"] == first
    tokens = ctx.config.milestones[first]
    ctx.event("milestone", milestone_tokens=tokens, step=first, tokens=tokens)
    assert amended.pause_step(ctx.state, ctx.config) == first, "it waits until the attempt has ended"
    ctx.event("eval_failed", milestone_tokens=tokens, step=first, message="", final=True)
    assert amended.pause_step(ctx.state, ctx.config) == second
    ctx.close()


def test_the_next_attempt_begins_with_what_is_due(run: RunPaths) -> None:
    amend(run, "optimizer.lr=1e-4")
    amend(run, "train.z_loss=1e-4", at="90")
    ctx = open_context(run)
    amended.adopt(ctx)
    assert ctx.config_number == 0, "attempt 1 has not ended, so it keeps its configuration"
    ctx.event("attempt_ended", attempt=1, cause="killed", evidence="", decision="restart")
    amended.adopt(ctx)
    assert (ctx.config_number, ctx.config.optimizer.lr, ctx.config.train.z_loss) == (1, 1e-4, 0.0)
    assert amended.config_words(ctx) == ("--config", str(run.amended_config(1)))
    ctx.close()


def drive(run: RunPaths) -> None:
    pretrain.drive(run, caller_of=lambda ctx: PlainCaller(ctx.clock))


@pytest.mark.processes
def test_a_finished_run_that_becomes_longer_trains_on_with_the_schedule_of_its_new_length(
    simulated_config: Config,
) -> None:
    cluster = SimulationConfig(shows_recovery=False, step_events=None)
    run = pretrain.create(simulated_config, argv=[], simulated=cluster)
    drive(run)
    assert read_state(run).step == 306
    drive(run)
    assert len(read_state(run).attempts) == 1
    amend(run, "train.tokens=3M")
    drive(run)
    state = read_state(run)
    assert (state.status, state.step, len(state.attempts)) == ("finished", 367, 2)
    assert [(a.number, a.applied_step) for a in state.amendments] == [(1, 306)]
    assert state.milestones[3_006_464].status == "evaluated"


@pytest.mark.processes
def test_an_amendment_that_comes_during_the_preparation_begins_with_the_first_attempt(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []

    def meanwhile(ctx: FlowContext) -> None:
        prepared.append(ctx.config.optimizer.schedule)
        if len(prepared) == 1:
            with JournalWriter(ctx.run, OPERATOR_WRITER, now_unix_s=ctx.clock.now_unix_s) as journal:
                changes = {"optimizer.schedule": ["cosine", "linear"]}
                journal.append(CONFIG_AMENDED, number=1, changes=changes, by="ana", why="", at_step=None)

    monkeypatch.setattr("flows.pretrain.check_coverage", meanwhile)
    run = pretrain.create(simulated_config, argv=[])
    drive(run)
    state = read_state(run)
    assert prepared == ["cosine", "linear"]
    assert {attempt.config_number for attempt in state.attempts} == {1}
    assert [a.applied_step for a in state.amendments] == [0]
    assert [e["stage"] for e in read_events(run) if e["kind"] == "stage_finished"].count("preflight") == 1


def test_a_simulated_run_is_amended_only_while_it_rests(simulated_config: Config) -> None:
    run = pretrain.create(simulated_config, argv=[])
    with hold_driver(run), pytest.raises(ConfigError, match="is simulated and runs now"):
        amend(run, "optimizer.lr=1e-4")
    with pytest.raises(ConfigError, match="simulated training doesn't end for an amendment"):
        amend(run, "optimizer.lr=1e-4", at="now")
    assert amend(run, "optimizer.lr=1e-4").number == 1
