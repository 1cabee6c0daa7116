"""The restart policy as a table, and what must hold for any history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import Cause, Ending
from flows.recovery.policy import Decision, decide, failing_step, hanging, history, restarts_without_progress
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event
from hlatctl.run.state import AttemptState, RunState

POLICY = RecoveryConfig(max_restarts_without_progress=3, backoff_s=2.0, max_backoff_s=300.0)
KILLED = Ending(cause="killed", evidence="a trainer process died of signal 9")
CAUSES: tuple[Cause, ...] = get_args(Cause)


def attempt(number: int, *, start: int = 0, last_step: int = 0, checkpoint: int = 0, **more: Any) -> AttemptState:
    return AttemptState(
        number,
        {},
        0.0,
        resumed_from_step=start,
        last_step=last_step,
        newest_checkpoint=checkpoint,
        ended_unix_s=1.0,
        **more,
    )


def conclude(state: RunState, ending: Ending, decision: Decision) -> None:
    """Set what the journal says after an attempt has ended."""
    newest = state.attempts[-1]
    newest.cause, newest.signature, newest.decision = ending.cause, ending.signature, decision.action
    newest.next_max_checkpoint_step = decision.max_checkpoint_step


@pytest.mark.parametrize(
    ("cause", "stop_requested", "last_step", "action", "why"),
    [
        ("finished", False, 10, "done", "training is finished"),
        ("stopped", True, 10, "stop", "stopped on request after writing a checkpoint"),
        ("budget", True, 10, "stop", "the run's budget is used up"),
        ("preempted", False, 10, "restart", "restarting from step 5"),
        ("reclaimed", False, 10, "restart", "restarting from step 5"),
        ("time_limit", False, 10, "restart", "restarting from step 5"),
        ("node_failed", False, 10, "restart", "restarting from step 5"),
        ("node_failed", False, 0, "restart", "restarting from step 5"),
        ("cancelled", False, 10, "stop", "hlatctl did not cancel it, so it stops the run"),
        ("cancelled", True, 10, "stop", "stopped on request; it ended before it could write a checkpoint"),
        ("rollback", False, 10, "restart", "restarting from step 5"),
        ("amended", False, 10, "restart", "restarting from step 5 with the amendment"),
        ("stage", False, 10, "restart", "the next stage begins from step 5"),
        ("evaluation", False, 10, "restart", "restarting from step 5 after the evaluation"),
        ("error", False, 10, "stop", "a restart can't fix this"),
        (
            "nonfinite",
            False,
            10,
            "stop",
            "a restart would compute the same numbers (train.on_nonfinite=rollback excludes such a batch)",
        ),
        ("disk_full", False, 10, "stop", "the disk would still be full after a restart"),
        ("crashed", False, 0, "stop", "it crashed before its first step: a fault of code or configuration"),
        ("crashed", False, 10, "restart", "restarting from step 5"),
        ("data_error", False, 10, "restart", "restarting from step 5"),
        ("storage_away", False, 0, "restart", "restarting from step 5"),
        ("out_of_memory", False, 0, "restart", "restarting from step 5"),
        ("nonfinite_weights", False, 10, "restart", "restarting from step 5"),
        ("shared_memory", False, 0, "restart", "restarting from step 5"),
        ("system_limit", False, 10, "restart", "restarting from step 5"),
        ("device_failed", False, 0, "restart", "restarting from step 5"),
        ("network", False, 0, "restart", "restarting from step 5"),
        ("collective_timeout", False, 10, "restart", "restarting from step 5"),
        ("hang", False, 0, "restart", "restarting from step 5"),
        ("corruption", False, 10, "restart", "restarting from step 5"),
        ("port_in_use", False, 0, "restart", "restarting from step 5"),
        ("killed", False, 0, "restart", "restarting from step 5"),
        ("killed", True, 10, "stop", "stopped on request; it ended before it could write a checkpoint"),
        ("lost", False, 10, "restart", "restarting from step 5"),
    ],
)
def test_what_follows_a_first_end(cause: Cause, stop_requested: bool, last_step: int, action: str, why: str) -> None:
    state = RunState(stop_requested=stop_requested, checkpoints=[5])
    state.attempts = [attempt(1, last_step=last_step, checkpoint=5)]
    decision = decide(state, Ending(cause=cause, evidence=""), POLICY)
    assert (decision.action, decision.why, decision.max_checkpoint_step) == (action, why, None)


def test_nothing_restarts_on_the_drivers_own_machine_when_it_is_taken_back() -> None:
    state = RunState(checkpoints=[5])
    state.attempts = [attempt(1, last_step=10, checkpoint=5)]
    decision = decide(state, Ending(cause="reclaimed", evidence=""), POLICY, here=True)
    assert (decision.action, decision.why) == ("stop", "this machine is taken back, and nothing can be restarted on it")


def test_the_table_above_has_every_cause() -> None:
    (mark,) = (m for m in test_what_follows_a_first_end.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(CAUSES)


def again(state: RunState, ending: Ending, **given: Any) -> Decision:
    """End the newest attempt, and add one that starts where the decision says and fails at the same step."""
    decision = decide(state, ending, POLICY, **given)
    conclude(state, ending, decision)
    ceiling = decision.max_checkpoint_step
    usable = [c for c in state.checkpoints if ceiling is None or c <= ceiling]
    step = failing_step(state.attempts[-1])
    state.attempts.append(
        attempt(len(state.attempts) + 1, start=usable[-1], last_step=step - 1, max_checkpoint_step=ceiling)
    )
    return decision


def test_the_same_failure_at_the_same_step_walks_back_then_stops_with_the_evidence() -> None:
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    crash = Ending(cause="crashed", evidence="ValueError: no")
    assert again(state, crash).why == "restarting from step 20"
    back = again(state, crash)
    assert (back.action, back.max_checkpoint_step) == ("walk_back", 10)
    assert back.why == "step 25 has failed twice in the same way: walking back from checkpoint 20 to 10"
    last = decide(state, crash, POLICY)
    assert (last.action, last.why) == ("stop", "step 25 has failed 3 times in the same way")
    assert last.hint.endswith("exclude the batch with `hlatctl data skip RUN --steps 25`")


@pytest.mark.parametrize(("last_step", "key"), [(0, "recovery.start_timeout_s"), (24, "recovery.hang_floor_s")])
def test_a_hang_that_repeats_names_the_key_that_gives_more_time(last_step: int, key: str) -> None:
    state = RunState(checkpoints=[20], attempts=[attempt(1, last_step=last_step, checkpoint=0)])
    hang = Ending(cause="hang", evidence="no step after step 24 for 600 s")
    for _ in range(2):
        decision = decide(state, hang, POLICY)
        conclude(state, hang, decision)
        state.attempts.append(attempt(len(state.attempts) + 1, last_step=last_step))
    last = decide(state, hang, POLICY)
    assert (last.action, last.hint) == ("stop", f"see the stacks in the logs; if it only needs longer, raise {key}")


def test_an_amendment_resets_the_budget_and_waits_for_nothing() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=7), attempt(2, last_step=7)])
    for earlier in state.attempts:
        earlier.cause, earlier.signature, earlier.decision = "killed", "killed: x", "restart"
    state.attempts.append(attempt(3, last_step=7))
    ended = decide(state, Ending(cause="amended", evidence=""), POLICY)
    assert (ended.action, ended.wait_s) == ("restart", 0.0)
    conclude(state, Ending(cause="amended", evidence=""), ended)
    state.attempts.append(attempt(4, last_step=7))
    assert history(state) == state.attempts[3:]


def test_a_pause_for_an_evaluation_is_no_automatic_restart_and_waits_for_nothing() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=5, checkpoint=5)])
    manual = replace(POLICY, enabled=False)
    ended = decide(state, Ending(cause="evaluation", evidence=""), manual)
    assert (ended.action, ended.why, ended.wait_s) == ("restart", "restarting from step 5 after the evaluation", 0.0)


def test_storage_that_stays_away_blames_neither_batch_nor_checkpoint_and_stops_at_last() -> None:
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    away = Ending(cause="storage_away", evidence="DataError: step 25: s3://bucket/a.arrow can't be read for 240 s")
    assert [again(state, away, batch=25).why for _ in range(2)] == ["restarting from step 20"] * 2
    last = decide(state, away, POLICY, batch=25)
    assert (last.action, last.why) == ("stop", "the corpus in object storage could not be read 3 times")


def test_another_failure_or_another_step_is_not_a_repetition() -> None:
    for changed in (Ending(cause="crashed", evidence="KeyError: 'x'"), KILLED):
        state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
        again(state, Ending(cause="crashed", evidence="ValueError: no"))
        assert decide(state, changed, POLICY).action == "restart"
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    again(state, KILLED)
    state.attempts[-1].last_step = 23
    assert decide(state, KILLED, POLICY).action == "restart"


def test_a_job_that_is_lost_again_at_the_same_step_is_limited_by_the_budget_of_restarts_only() -> None:
    state = RunState(checkpoints=[10, 20])
    state.attempts = [attempt(1, last_step=24, checkpoint=20)]
    lost = Ending(cause="lost", evidence="the job's process is gone and left no exit code")
    actions = [again(state, lost).action for _ in range(POLICY.max_restarts_without_progress + 2)]
    assert actions == ["restart"] * (POLICY.max_restarts_without_progress + 1) + ["stop"]


def test_the_only_checkpoint_is_not_walked_back_from() -> None:
    state = RunState(checkpoints=[20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    again(state, KILLED)
    assert decide(state, KILLED, POLICY).why == "restarting from step 20"


def test_a_checkpoint_left_by_a_walk_back_is_not_loaded_until_an_attempt_passes_it() -> None:
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    again(state, KILLED)
    assert again(state, KILLED).max_checkpoint_step == 10
    preempted = Ending(cause="preempted", evidence="asked to stop; checkpoint written")
    walked = state.attempts[-1]
    walked.last_step = walked.newest_checkpoint = 14
    state.checkpoints = [10, 14, 20]
    decision = decide(state, preempted, POLICY)
    assert (decision.max_checkpoint_step, decision.why) == (14, "restarting from step 14")
    walked.last_step, walked.newest_checkpoint, state.checkpoints = 21, 20, [10, 20]
    assert decide(state, preempted, POLICY).max_checkpoint_step is None, "it wrote checkpoint 20 itself"
    walked.last_step, walked.newest_checkpoint, state.checkpoints = 10, 0, [20]
    assert decide(state, preempted, POLICY).max_checkpoint_step is None, "checkpoint 10 was found to be damaged"


@pytest.mark.parametrize(
    ("trusted", "ceiling", "start"),
    [(17, 17, "from step 10"), (20, 20, "from step 20"), (3, None, "from step 30"), (None, None, "from step 30")],
)
def test_after_corruption_only_checkpoints_up_to_the_last_good_check_are_loaded(
    trusted: int | None, ceiling: int | None, start: str
) -> None:
    state = RunState(checkpoints=[10, 20, 30], attempts=[attempt(1, last_step=34, checkpoint=30)], trusted_step=trusted)
    wrong = Ending(cause="corruption", evidence="TrainingError: rank 3 is wrong", hosts=("n3",))
    decision = decide(state, wrong, POLICY, left_out=("n3",), several=True)
    assert (decision.action, decision.max_checkpoint_step) == ("restart_without", ceiling)
    assert decision.why == f"restarting {start} without n3"
    assert decide(state, KILLED, POLICY).max_checkpoint_step is None


def test_after_corruption_before_the_first_good_checkpoint_the_run_begins_again_until_it_has_another_one() -> None:
    state = RunState(checkpoints=[10], attempts=[attempt(1, last_step=14, checkpoint=10)], trusted_step=0)
    wrong = Ending(cause="corruption", evidence="TrainingError: rank 3 is wrong")
    decision = decide(state, wrong, POLICY)
    assert (decision.max_checkpoint_step, decision.why) == (0, "restarting from the beginning")
    conclude(state, wrong, decision)
    state.attempts.append(attempt(2, last_step=4, max_checkpoint_step=0))
    assert decide(state, KILLED, POLICY).max_checkpoint_step == 0
    state.attempts[-1].newest_checkpoint = 10
    assert decide(state, KILLED, POLICY).max_checkpoint_step is None


def test_corruption_that_nobody_is_blamed_for_ends_the_run_at_last() -> None:
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)], trusted_step=20)
    tie = Ending(cause="corruption", evidence="TrainingError: one of rank 0 (cuda:0 on a), rank 8 (cuda:0 on b)")
    decisions = [decide(state, tie, POLICY, several=True)]
    while decisions[-1].action != "stop" and len(decisions) < 9:
        conclude(state, tie, decisions[-1])
        ceiling = decisions[-1].max_checkpoint_step
        state.attempts.append(attempt(len(state.attempts) + 1, start=ceiling or 20, max_checkpoint_step=ceiling))
        decisions.append(decide(state, tie, POLICY, several=True))
    assert len(decisions) <= 5


def test_a_batch_that_fails_twice_is_excluded() -> None:
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    bad = Ending(cause="data_error", evidence="IndexError: index out of range in self")
    assert again(state, bad, batch=27).action == "restart"
    decision = again(state, bad, batch=27)
    assert (decision.action, decision.skip_batch) == ("skip_data", 27)
    assert decision.why == "step 25 has failed twice on its data: restarting from step 20 without batch 27"
    assert decide(state, bad, POLICY, batch=28).action == "stop"
    state = RunState(checkpoints=[10, 20], attempts=[attempt(1, last_step=24, checkpoint=20)])
    again(state, bad)
    assert decide(state, bad, POLICY).action == "walk_back", "the batch is unknown"


def test_an_attempt_that_runs_out_of_memory_is_restarted_once() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=9, checkpoint=5)])
    empty = Ending(cause="out_of_memory", evidence="torch.OutOfMemoryError: CUDA out of memory")
    assert again(state, empty).action == "restart"
    state.attempts[-1].last_step = 7
    decision = decide(state, empty, POLICY)
    assert (decision.action, decision.why) == ("stop", "out of memory again after a restart")
    assert decision.hint.startswith("lower train.micro_batch_size")
    state.attempts[-1].newest_checkpoint = 8
    assert decide(state, empty, POLICY).action == "restart", "it made progress in between"


def test_a_node_that_the_ledger_leaves_out_is_named() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=9, checkpoint=5)])
    decision = decide(state, KILLED, POLICY, left_out=("node-7",))
    assert (decision.action, decision.why) == ("restart_without", "restarting from step 5 without node-7")


def test_restarts_without_a_new_checkpoint_wait_longer_then_stop() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=9, checkpoint=5)])
    waits = [decide(state, KILLED, POLICY).wait_s]
    for number in range(2, 5):
        state.attempts.append(attempt(number, start=5, last_step=number + 5))
        waits.append(decide(state, KILLED, POLICY).wait_s)
    assert waits == [0.0, 2.0, 4.0, 8.0]
    state.attempts.append(attempt(5, start=5, last_step=12))
    decision = decide(state, KILLED, POLICY)
    assert decision.action == "stop"
    assert decision.why == ("3 restarts in a row made no new checkpoint (recovery.max_restarts_without_progress=3)")


def test_resuming_resets_the_restart_budget() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=9, checkpoint=5)])
    again(state, KILLED)
    again(state, KILLED)
    conclude(state, KILLED, decide(state, KILLED, POLICY))
    assert state.attempts[-1].decision == "stop"
    state.attempts.append(attempt(4, start=5, last_step=9))
    decision = decide(state, KILLED, POLICY)
    assert (decision.action, restarts_without_progress(state)) == ("restart", 1)


def test_a_restart_says_when_a_later_step_than_the_checkpoint_may_be_in_memory() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=9, checkpoint=5)])
    wrong = Ending(cause="rollback", evidence="loss=nan")
    assert decide(state, KILLED, POLICY, in_memory=True).why == "restarting from step 5 or a later step in memory"
    assert decide(state, wrong, POLICY, in_memory=True).why == "restarting from step 5", "its copies may be wrong too"


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 5))
def test_a_run_restarts_while_it_makes_checkpoints_or_has_restarts_left(gains: list[bool], limit: int) -> None:
    policy = replace(POLICY, max_restarts_without_progress=limit)
    state, checkpoint = RunState(), 0
    for number, gain in enumerate(gains, start=1):
        start, checkpoint = checkpoint, checkpoint + gain
        state.attempts.append(attempt(number, start=start, last_step=checkpoint + 1, checkpoint=checkpoint * gain))
        state.checkpoints = [checkpoint] if checkpoint else []
        without = next((i for i, gained in enumerate(reversed(gains[:number])) if gained), number)
        assert restarts_without_progress(state) == without
        decision = decide(state, Ending(cause="killed", evidence=str(number)), policy)
        assert decision.action == ("stop" if without > limit else "restart")
        assert 0 <= decision.wait_s <= policy.max_backoff_s


class Simulation:
    """A run of 60 steps with a checkpoint every 10; each attempt fails with a given ending after a number of steps."""

    STEPS, EVERY = 60, 10

    def __init__(self) -> None:
        self.state, self.best, self.since = RunState(), 0, 0

    def play(self, steps: int, ending: Ending, *, batch: int | None) -> Decision:
        ceiling = self.state.attempts[-1].next_max_checkpoint_step if self.state.attempts else None
        start = max((c for c in self.state.checkpoints if ceiling is None or c <= ceiling), default=0)
        end = min(start + steps, self.STEPS)
        written = [step for step in range(start + 1, end + 1) if step % self.EVERY == 0]
        self.state.checkpoints = sorted({*self.state.checkpoints, *written})
        number = len(self.state.attempts) + 1
        self.state.attempts.append(
            attempt(
                number,
                start=start,
                last_step=end if steps else 0,
                checkpoint=max(written, default=0),
                max_checkpoint_step=ceiling,
            )
        )
        self.since = 0 if max(written, default=0) > self.best else self.since + 1
        self.best = max(self.best, *written, 0)
        decision = decide(self.state, ending, POLICY, batch=batch)
        conclude(self.state, ending, decision)
        return decision


failures = st.tuples(
    st.integers(0, 25),
    # A person causes each of the others, or the run's plan does.
    st.sampled_from([c for c in CAUSES if c not in ("finished", "stopped", "amended", "stage")]),
    st.integers(0, 2),
    st.none() | st.integers(1, 60),
)


@given(st.lists(failures, min_size=40, max_size=40))
def test_every_sequence_of_failures_ends(story: list[tuple[int, Cause, int, int | None]]) -> None:
    run = Simulation()
    most = (POLICY.max_restarts_without_progress + 1) * (run.STEPS // run.EVERY + 1)
    for number, (steps, cause, kind, batch) in enumerate(story, start=1):
        decision = run.play(steps, Ending(cause=cause, evidence=f"{'abc'[kind]}"), batch=batch)
        assert run.since <= POLICY.max_restarts_without_progress or decision.action == "stop"
        if decision.max_checkpoint_step is not None:
            assert decision.max_checkpoint_step in run.state.checkpoints, "it can be loaded"
        if decision.action == "stop":
            return
        assert number <= most


events = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(
            [
                "attempt_started",
                "train_started",
                "step",
                "checkpoint_written",
                "checkpoint_deleted",
                "train_stopped",
                "hang",
                "attempt_ended",
                "straggler",
                "stop_requested",
                "head_started",
                "amended",
            ]
        ),
        "attempt": st.integers(1, 4),
        "step": st.integers(1, 40),
        "step_s": st.floats(0.01, 10.0),
    },
    optional={
        "resumed_from_step": st.integers(0, 40),
        "reason": st.sampled_from(["stop", "rollback", "finished"]),
        "cause": st.sampled_from(CAUSES),
        "signature": st.text(max_size=3),
        "evidence": st.text(max_size=3),
        "max_checkpoint_step": st.integers(0, 40),
        "decision": st.sampled_from(["restart", "stop", "walk_back"]),
    },
)


@given(st.lists(events, max_size=30), st.sampled_from(CAUSES))
def test_every_prefix_of_a_journal_gives_a_decision(journal: list[Event], cause: Cause) -> None:
    whole = [
        {
            "v": 1,
            "seq": seq,
            "time_unix_s": float(seq),
            "writer": "train-rank00000",
            "handle": {},
            "tokens": event["step"],
            "message": "m",
            "host": "h",
            **event,
        }
        for seq, event in enumerate(journal, start=1)
    ]
    for length in range(len(whole) + 1):
        state = fold(whole[:length])
        if not state.attempts:
            continue
        decision = decide(state, Ending(cause=cause, evidence="x"), POLICY, batch=1)
        assert decision.why
        assert "{" not in decision.why + decision.hint
        if cause in ("finished", "error", "stopped"):
            assert decision.action in ("done", "stop")
        hanging(state, 1e9, POLICY)


def training(*step_s: float) -> RunState:
    state = RunState(attempts=[attempt(1, last_step=len(step_s))])
    for step, took in enumerate(step_s, start=1):
        state.steps.add({"step": step, "tokens": step, "step_s": took})
    return state


def test_a_silence_of_many_median_steps_is_a_hang_but_never_below_the_floor() -> None:
    policy = RecoveryConfig(hang_factor=10.0, hang_floor_s=30.0, start_timeout_s=600.0)
    slow = training(*[100.0] * 5, *[7.0] * 20)
    assert not hanging(slow, 70.0, policy)
    assert hanging(slow, 70.1, policy) == (
        "no step after step 25 for 70 s, the recent median being 7 s "
        "(recovery.hang_factor=10, recovery.hang_floor_s=30)"
    )
    quick = training(*[0.1] * 30)
    assert not hanging(quick, 29.0, policy)
    assert hanging(quick, 31.0, policy).startswith("no step after step 30 for 30 s")


def test_a_silence_between_steps_that_are_not_journalled_is_no_hang() -> None:
    policy = RecoveryConfig(hang_factor=10.0, hang_floor_s=30.0, start_timeout_s=600.0)
    state = training(*[1.0] * 30)
    state.attempts[-1].log_freq = 100
    assert not hanging(state, 109.0, policy)
    assert hanging(state, 109.1, policy)


def test_before_the_first_step_the_limit_is_the_start_timeout() -> None:
    policy = RecoveryConfig(hang_factor=10.0, hang_floor_s=30.0, start_timeout_s=600.0)
    state = training()
    assert not hanging(state, 599.0, policy)
    assert hanging(state, 601.0, policy) == "no first step after 600 s (recovery.start_timeout_s)"
    resumed = training(*[1.0] * 20)
    resumed.attempts.append(attempt(2, start=20))
    assert not hanging(resumed, 599.0, policy), "the steps are of an earlier attempt"


def test_an_attempt_that_has_stopped_training_has_a_minute_to_end_however_short_its_steps_were() -> None:
    policy = RecoveryConfig(hang_factor=10.0, hang_floor_s=6.0)
    stopped = training(*[0.1] * 30)
    stopped.train_stopped = "stop"
    assert not hanging(stopped, 59.0, policy)
    assert hanging(stopped, 61.0, policy) == "training has stopped, but its processes have not ended for 60 s"
    assert hanging(training(*[0.1] * 30), 59.0, policy)
