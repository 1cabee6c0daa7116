"""The restart policy as a table, and what must hold for any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import RecoveryConfig
from flows.launch.base import Status
from flows.recovery import Cause, Ending, classify, decide, restarts_without_progress
from hlatctl.run.errors import DataError, HlatctlError
from hlatctl.run.state import AttemptState, RunState

POLICY = RecoveryConfig(max_restarts_without_progress=3, backoff_s=2.0, max_backoff_s=300.0)
SIGKILL_LOG = "trainer FAILED\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 4711)\n"


def attempt(number: int, *, start: int = 0, last_step: int = 0, checkpoint: int = 0) -> AttemptState:
    return AttemptState(
        number, {}, 0.0, resumed_from_step=start, last_step=last_step, newest_checkpoint=checkpoint, ended_unix_s=1.0
    )


@pytest.mark.parametrize(
    ("exit_code", "train_stopped", "error", "log", "cause"),
    [
        (0, "finished", None, "", "finished"),
        (1, "stop", None, "", "stopped"),
        (1, "", DataError("data.path=x: gone"), SIGKILL_LOG, "error"),
        (1, "", None, SIGKILL_LOG, "killed"),
        (137, "", None, "", "killed"),
        (1, "", None, "ValueError: no\n  exitcode  : 1 (pid: 5)", "crashed"),
        (None, "", None, "", "lost"),
    ],
)
def test_the_cause_of_an_end_is_read_from_what_it_left(
    exit_code: int | None, train_stopped: str, error: HlatctlError | None, log: str, cause: Cause
) -> None:
    state = Status(state="lost") if exit_code is None else Status(state="failed", exit_code=exit_code)
    assert classify(status=state, train_stopped=train_stopped, error=error, log_tail=log).cause == cause


def test_a_crash_names_the_exception() -> None:
    ending = classify(
        status=Status(state="failed", exit_code=1), train_stopped="", error=None,
        log_tail="[default0]:[rank0]: torch.cuda.OutOfMemoryError: out of memory\nexitcode  : 1 (pid: 5)",
    )  # fmt: skip
    assert ending.evidence == "torch.cuda.OutOfMemoryError: out of memory"


@pytest.mark.parametrize(
    ("cause", "stop_requested", "last_step", "action", "why"),
    [
        ("finished", False, 10, "done", "training is finished"),
        ("stopped", True, 10, "stop", "stopped on request after writing a checkpoint"),
        ("stopped", False, 10, "restart", "restarting from step 5"),
        ("error", False, 10, "stop", "a restart can not mend this"),
        ("crashed", False, 0, "stop", "it crashed before its first step: a fault of code or configuration"),
        ("crashed", False, 10, "restart", "restarting from step 5"),
        ("killed", False, 0, "restart", "restarting from step 5"),
        ("killed", True, 10, "stop", "stopped on request; it ended before it could write a checkpoint"),
        ("lost", False, 10, "restart", "restarting from step 5"),
    ],
)
def test_what_follows_an_end(cause: Cause, stop_requested: bool, last_step: int, action: str, why: str) -> None:
    state = RunState(stop_requested=stop_requested, checkpoints=[5])
    state.attempts = [attempt(1, last_step=last_step, checkpoint=5)]
    decision = decide(state, Ending(cause=cause, evidence=""), POLICY)
    assert (decision.action, decision.why) == (action, why)


def test_restarts_without_a_new_checkpoint_wait_longer_and_then_end() -> None:
    state = RunState(checkpoints=[5], attempts=[attempt(1, last_step=9, checkpoint=5)])
    killed = Ending(cause="killed", evidence="")
    waits = [decide(state, killed, POLICY).wait_s]
    for number in range(2, 5):
        state.attempts.append(attempt(number, start=5, last_step=7))
        waits.append(decide(state, killed, POLICY).wait_s)
    assert waits == [0.0, 2.0, 4.0, 8.0]
    state.attempts.append(attempt(5, start=5, last_step=7))
    decision = decide(state, killed, POLICY)
    assert decision.action == "stop"
    assert decision.why == ("3 restarts in a row gained no checkpoint (recovery.max_restarts_without_progress=3)")


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 5))
def test_a_run_restarts_exactly_while_it_gains_checkpoints_or_has_restarts_left(gains: list[bool], limit: int) -> None:
    policy = RecoveryConfig(max_restarts_without_progress=limit, backoff_s=1.0, max_backoff_s=60.0)
    state, checkpoint = RunState(), 0
    for number, gain in enumerate(gains, start=1):
        start, checkpoint = checkpoint, checkpoint + gain
        state.attempts.append(attempt(number, start=start, last_step=checkpoint + 1, checkpoint=checkpoint * gain))
        state.checkpoints = [checkpoint] if checkpoint else []
        without = next((i for i, gained in enumerate(reversed(gains[:number])) if gained), number)
        assert restarts_without_progress(state) == without
        decision = decide(state, Ending(cause="killed", evidence=""), policy)
        assert decision.action == ("stop" if without > limit else "restart")
        assert 0 <= decision.wait_s <= 60.0
