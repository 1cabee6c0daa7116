"""The state of a run: superseded steps, damaged events, and a new driver after an old outcome."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run.fold import fold
from hlatctl.run.journal import Event
from hlatctl.run.state import RunState


class Story:
    """Events one second apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: str, attempt: int = 0, **fields: Any) -> Story:
        seq = len(self.events) + 1
        self.events.append(
            {
                "v": 1,
                "seq": seq,
                "time_unix_s": float(seq),
                "attempt": attempt,
                "kind": kind,
                "writer": "test",
                **fields,
            }
        )
        return self

    def train(self, attempt: int, resumed: int, last: int, loss: float) -> Story:
        self.add("attempt_started", attempt, handle={})
        self.add("train_started", attempt, resumed_from_step=resumed, tokens=resumed * 10)
        for step in range(resumed + 1, last + 1):
            self.add("step", attempt, step=step, tokens=step * 10, loss=loss)
        return self

    def fold(self) -> RunState:
        return fold(self.events)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=6))
def test_a_step_counts_once_with_its_newest_value(restarts: list[tuple[int, int]]) -> None:
    story, reached = Story(), 0
    expected: dict[int, float] = {}
    for number, (back, forward) in enumerate(restarts, start=1):
        resumed = max(0, reached - back)
        reached = resumed + forward
        story.train(number, resumed, reached, loss=float(number))
        expected = {step: loss for step, loss in expected.items() if step <= resumed}
        expected.update({step: float(number) for step in range(resumed + 1, reached + 1)})
    state = story.fold()
    assert {step: event["loss"] for step, event in state.steps.items()} == expected
    assert state.tokens == 10 * reached


def test_a_late_line_of_a_replaced_attempt_does_not_count() -> None:
    story = Story().train(1, 0, 5, loss=1.0).train(2, 3, 6, loss=2.0)
    story.add("step", 1, step=6, tokens=60, loss=9.0)
    assert [event["loss"] for event in story.fold().steps.values()] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_spikes_of_superseded_steps_are_forgotten() -> None:
    story = Story().train(1, 0, 5, loss=1.0)
    story.add("gradient_spike", 1, step=2).add("gradient_spike", 1, step=5)
    story.train(2, 3, 6, loss=2.0)
    assert [spike["step"] for spike in story.fold().spikes] == [2]


def test_a_damaged_event_gives_a_warning_and_the_others_count() -> None:
    story = Story().train(1, 0, 3, loss=1.0)
    story.add("step", 1, step="x", tokens=40).add("milestone", milestone_tokens=[]).add("step", 1, step=4)
    state = story.fold()
    assert state.step == 3
    assert state.warnings == [
        "event test 6 (step): damaged, ignored",
        "event test 7 (milestone): damaged, ignored",
        "event test 8 (step): damaged, ignored",
    ]


def test_a_new_driver_resets_an_old_outcome() -> None:
    story = Story().add("run_created", run_id="r", simulated=True).add("head_started").add("stop_requested", by="me")
    story.add("run_finished", outcome="stopped", message="asked to")
    stopped = story.fold()
    assert (stopped.status, stopped.stop_requested, stopped.message) == ("stopped", True, "asked to")
    resumed = story.add("head_started").fold()
    assert (resumed.status, resumed.stop_requested, resumed.message) == ("running", False, "")
    assert resumed.simulated


def test_checkpoints_are_those_neither_rejected_nor_deleted() -> None:
    story = Story().train(1, 0, 3, loss=1.0)
    for step in (1, 2, 3):
        story.add("checkpoint_committed", 1, step=step)
    story.add("checkpoint_verified", 1, step=2).add("checkpoint_survived", 1, step=2)
    story.add("checkpoint_verified", 2, step=2)  # read again before it was loaded
    story.add("checkpoint_written", 1, step=4, tokens=40)
    state = story.add("checkpoint_rejected", 1, step=3, reason="x").add("checkpoint_deleted", 1, step=1).fold()
    assert state.trust == {2: "survived"}, "what is only written does not count"
    assert state.checkpoints == [2]


def test_an_evaluation_that_will_be_tried_again_is_due() -> None:
    story = Story().add("milestone", milestone_tokens=100, step=10, tokens=100)
    due: dict[str, Any] = {"milestone_tokens": 100, "step": 10, "message": "out of memory"}
    assert story.add("eval_failed", final=False, **due).fold().milestones[100].status == "due"
    failed = story.add("eval_failed", final=True, **due).fold().milestones[100]
    assert (failed.status, failed.message) == ("failed", "out of memory")
    scores = {"validation_loss": {"metric": "loss_nats_per_token", "value": 3.0}}
    done = story.add("eval_finished", milestone_tokens=100, step=10, scores=scores).fold().milestones[100]
    assert (done.status, done.scores, done.message) == ("evaluated", scores, "")


def test_a_milestone_keeps_the_contract_of_its_scores_and_survives_damaged_ones() -> None:
    story = Story().add("eval_finished", milestone_tokens=100, step=10, scores={}, contract="abc")
    assert story.fold().milestones[100].contract == "abc"
    state = story.add("eval_finished", milestone_tokens=100, step=10, scores=[1, 2]).fold()
    assert (state.milestones[100].scores, state.milestones[100].contract) == ({}, "abc")
    assert state.warnings == ["event test 2 (eval_finished): damaged, ignored"]


def _scores(value: float) -> dict[str, Any]:
    return {"piqa": {"metric": "acc", "value": value, "stderr": 0.1, "n": 9}}


def test_scores_under_another_contract_never_replace_those_under_the_run_s_own() -> None:
    story = Story().add("milestone", milestone_tokens=10, step=1).add("milestone", milestone_tokens=20, step=2)
    story.add("eval_finished", milestone_tokens=10, step=1, scores=_scores(0.1), contract="old")
    story.add("eval_started", milestone_tokens=10, step=1, contract="new", tasks=["piqa"])
    assert story.fold().milestones[10].status == "evaluated", "it stays so while it is evaluated otherwise"
    story.add("eval_finished", milestone_tokens=10, step=1, scores=_scores(0.2), contract="new")
    story.add("eval_finished", milestone_tokens=20, step=2, scores=_scores(0.3), contract="new")
    state = story.fold()
    assert state.contract == "old"
    first, second = state.milestones[10], state.milestones[20]
    assert (first.contract, first.scores, [o.contract for o in first.others]) == ("old", _scores(0.1), ["new"])
    assert (second.contract, second.scores, second.others) == ("new", _scores(0.3), [])


def test_a_failure_under_another_contract_leaves_a_milestone_evaluated() -> None:
    story = Story().add("eval_finished", milestone_tokens=10, step=1, scores=_scores(0.1), contract="old")
    story.add("eval_failed", milestone_tokens=10, step=1, message="no room", final=True)
    milestone = story.fold().milestones[10]
    assert (milestone.status, milestone.message, milestone.last_failure) == ("evaluated", "", "no room")


def test_progress_counts_the_answers_of_an_earlier_try_separately() -> None:
    story = Story().add("milestone", milestone_tokens=10, step=1)
    story.add("eval_started", milestone_tokens=10, step=1, tasks=["piqa", "gsm8k"])
    story.add("eval_task_started", milestone_tokens=10, task="gsm8k")
    story.add("eval_progress", milestone_tokens=10, task="gsm8k", done=4, total=10)
    story.add("eval_progress", milestone_tokens=10, task="gsm8k", done=7, total=10)
    progress = story.fold().milestones[10].progress
    assert progress is not None
    assert (progress.task, progress.done, progress.total, progress.done_before) == ("gsm8k", 7, 10, 4)
    assert progress.updated_unix_s - progress.task_started_unix_s == 1.0
    story.add("eval_finished", milestone_tokens=10, step=1, scores=_scores(0.1), contract="old")
    assert story.fold().milestones[10].progress is None


def test_an_amendment_is_in_force_after_the_newest_step_that_a_process_named() -> None:
    story = Story().add("config_amended", number=1, changes={"optimizer.lr": [3e-4, 1e-4]}, by="ana", why="spikes")
    story.add("config_amended", number=2, changes={"cluster.nodes": [2, 4]}, by="ana", at_step=50)
    story.add("amendment_applied", attempt=2, number=1, step=40).add("amendment_applied", attempt=3, number=1, step=30)
    first, second = story.fold().amendments
    assert (first.changes, first.by, first.why, first.applied_step) == (
        {"optimizer.lr": [3e-4, 1e-4]},
        "ana",
        "spikes",
        30,
    )
    assert (second.at_step, second.applied_step) == (50, None)


def test_an_amendment_whose_changes_are_damaged_gives_a_warning() -> None:
    state = Story().add("config_amended", number=1, changes={"optimizer.lr": 3}, by="ana").fold()
    assert not state.amendments
    assert len(state.warnings) == 1


def test_what_the_newest_step_used_is_kept_as_far_as_it_is_known() -> None:
    first: dict[str, Any] = {"mfu": 0.4, "memory_bytes": 5, "peak_memory_bytes": 9}
    story = Story().train(1, 0, 2, 3.0).add("step", 1, step=3, tokens=30, **first)
    assert story.fold().used == first
    assert story.add("step", 1, step=4, tokens=40, mfu=None, memory_bytes=6).fold().used == {"memory_bytes": 6}


def test_restarts_are_those_after_failures_and_none_that_a_person_caused() -> None:
    story, ends = Story(), ["killed", "amended", "stopped", "crashed", "hang", "finished"]
    decisions = ["restart", "restart", "stop", "stop", "walk_back", "done"]
    for number, (cause, decision) in enumerate(zip(ends, decisions, strict=True), start=1):
        story.train(number, number - 1, number, loss=1.0)
        assert story.fold().restarts == [0, 1, 1, 1, 1, 2][number - 1], f"before attempt {number} ended"
        story.add("attempt_ended", number, cause=cause, decision=decision)
    state = story.fold()
    assert state.restarts == 2
    assert [attempt.cause for attempt in state.attempts if attempt.has_failed] == ["killed", "crashed", "hang"]


def test_a_profile_that_is_asked_of_an_attempt_that_is_over_fails() -> None:
    asked: dict[str, Any] = {"number": 1, "steps": 5, "ranks": [0], "memory": True, "by": "ana"}
    story = Story().train(1, 0, 3, loss=1.0)
    assert Story().train(1, 0, 3, loss=1.0).add("profile_requested", 1, **asked).fold().open_profile is not None
    story.add("attempt_ended", 1, cause="killed", decision="restart").add("profile_requested", 1, **asked)
    assert [profile.status for profile in story.fold().profiles] == ["failed"]
    unended = Story().train(1, 0, 3, loss=1.0).add("profile_requested", 1, **asked).train(2, 3, 4, loss=1.0)
    assert unended.fold().open_profile is None, "the end of attempt 1 is not in the journal"


class Counted(int):
    """A number that counts how often such numbers are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int.__lt__(self, other)

    def __gt__(self, other: int) -> bool:
        Counted.compared += 1
        return int.__gt__(self, other)

    __hash__ = int.__hash__


def test_a_journal_with_very_many_attempts_profiles_and_amendments_is_folded_in_linear_time() -> None:
    story, count = Story(), 500
    for number in map(Counted, range(1, count + 1)):
        story.add("attempt_started", number, handle={}).add("config_amended", number=number, changes={})
        story.add("profile_requested", number, number=number, steps=5, ranks=[0])
        story.add("profile_failed", number, number=number)
    for number in map(Counted, range(1, count + 1)):
        story.add("attempt_ended", number, cause="killed").add("hang", number, evidence="silent")
        story.add("amendment_applied", number=number, step=1).add("profile_failed", number=number)
    Counted.compared = 0
    state = story.fold()
    assert Counted.compared < len(story.events) * 20
    assert not state.warnings
    assert all(a.cause == "killed" and a.hang for a in state.attempts)
    assert all(a.applied_step == 1 for a in state.amendments)
    assert [p.status for p in state.profiles] == ["failed"] * count


def test_an_attempt_with_an_earlier_number_gives_a_warning() -> None:
    story = Story().add("attempt_started", 1, handle={}).add("attempt_started", 3, handle={})
    state = story.add("attempt_started", 2, handle={}).add("attempt_started", 3, handle={}).fold()
    assert [attempt.number for attempt in state.attempts] == [1, 3]
    assert len(state.warnings) == 2


def test_a_late_spike_is_placed_by_its_step() -> None:
    story = Story().train(1, 0, 5, loss=1.0).train(2, 2, 6, loss=1.0)
    for step in (3, 5, 4):
        story.add("gradient_spike", 2, step=step)
    assert [spike["step"] for spike in story.fold().spikes] == [3, 4, 5]
    assert [spike["step"] for spike in story.add("train_started", 3, resumed_from_step=4).fold().spikes] == [3, 4]


@pytest.mark.parametrize("order", [("head_started", "stop_requested"), ("stop_requested", "head_started")])
def test_a_request_to_stop_reaches_the_driver_that_it_names_in_any_order_of_events(order: tuple[str, str]) -> None:
    fields: dict[str, dict[str, Any]] = {"head_started": {"token": "second"}, "stop_requested": {"driver": "second"}}
    story = Story().add("head_started", token="first")
    for kind in order:
        story.add(kind, **fields[kind])
    assert story.fold().stop_requested
    assert not story.add("head_started", token="third").fold().stop_requested
    assert not story.add("stop_requested", driver="second").fold().stop_requested, "its clock was ahead"


def test_nodes_are_held_until_the_last_event_that_no_person_wrote() -> None:
    story = Story().train(1, 0, 3, 1.0)
    before = story.fold().held_s
    assert sum(before.values()) > 0
    story.add("labelled", note="its driver is dead", writer="operator", time_unix_s=9_000.0)
    assert story.fold().held_s == before
