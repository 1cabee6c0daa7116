"""Runs of several nodes: failures of nodes are told from failures of software, for any history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import Cause, Ending
from flows.recovery.policy import Decision, decide
from hlatctl.run.state import AttemptState, RunState

POLICY = RecoveryConfig(max_restarts_without_progress=3, max_nodes_without_progress=5)
#: What a process that is killed leaves, whichever node it was on.
SIGNAL = "a trainer process died of signal 6"


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ends.

    Args:
        node: the node to blame; empty: unknown.
        steps: steps after the checkpoint that it loaded; None: it did not start.
        rejected: preflight rejects the node before the next attempt.
    """

    node: str = ""
    cause: Cause = "killed"
    evidence: str = SIGNAL
    steps: int | None = None
    rejected: bool = False


def play(ends: Iterable[End], *, left_out: str = "") -> list[Decision]:
    """Return the decisions of a run that restarts from step 20 every time, up to the one that ends it."""
    state, decisions = RunState(checkpoints=[10, 20]), []
    state.attempts = [
        AttemptState(1, {}, 0.0, resumed_from_step=0, last_step=20, newest_checkpoint=20, cause="preempted")
    ]
    for number, end in enumerate(ends, start=2):
        attempt = AttemptState(number, {}, 0.0, resumed_from_step=None if end.steps is None else 20)
        attempt.last_step = 20 + end.steps if end.steps else 0
        state.attempts.append(attempt)
        ending = Ending(cause=end.cause, evidence=end.evidence, hosts=(end.node,) if end.node else ())
        gone = (left_out,) if left_out and left_out == end.node else ()
        decision = decide(state, ending, POLICY, left_out=gone, several=True)
        decisions.append(decision)
        attempt.cause, attempt.signature, attempt.decision = ending.cause, ending.signature, decision.action
        attempt.blamed_hosts, attempt.ended_unix_s = list(ending.hosts), 1.0
        attempt.rejected_hosts = list(ending.hosts) if end.rejected else []
        if decision.action == "stop":
            break
    return decisions


def actions(*ends: End) -> list[str]:
    return [decision.action for decision in play(ends)]


def test_failed_starts_of_different_nodes_are_no_repetition_and_use_no_restarts() -> None:
    assert actions(*(End(node=f"n{number}") for number in range(5))) == ["restart"] * 5


def test_so_many_nodes_without_a_fault_that_preflight_finds_are_a_fault_of_software() -> None:
    *before, last = play([End(node=f"n{number}") for number in range(9)])
    assert len(before) == POLICY.max_nodes_without_progress
    assert last.why == (
        "6 nodes failed without a new checkpoint, and preflight found no fault in them "
        "(recovery.max_nodes_without_progress=5)"
    )
    assert last.hint == "look for a fault of software in the logs of these attempts"


def test_a_node_that_fails_again_counts_and_the_third_failure_in_the_same_way_ends_the_run_unless_it_is_replaced() -> (
    None
):
    same = [End(node="n1")] * 3
    assert actions(*same) == ["restart", "restart", "stop"], "and no walk back"
    last = play(same, left_out="n1")[-1]
    assert (last.action, last.why) == ("restart_without", "restarting from step 20 without n1")
    ways = [End(node="n1", evidence=way) for way in "abcdefghi"]
    assert actions(*ways) == ["restart"] * 4 + ["stop"], "the first failure of a node is the node's"


def test_different_nodes_that_fail_at_the_same_later_step_are_a_repetition_without_a_walk_back() -> None:
    assert actions(*(End(node=f"n{number}", steps=7) for number in range(3))) == ["restart", "restart", "stop"]
    later = [End(node=f"n{number}", steps=7 + number) for number in range(3)]
    assert actions(*later) == ["restart"] * 3


def test_starts_that_fail_on_an_unknown_node_end_the_run_without_a_walk_back() -> None:
    assert actions(*[End()] * 3) == ["restart", "restart", "stop"]
    assert actions(*[End(cause="crashed", steps=7)] * 3) == ["restart", "walk_back", "stop"]


#: What shows that a node was at fault: the scheduler, or preflight after a failure of any kind.
proofs = st.sampled_from([{"cause": "node_failed"}, {"rejected": True}, {"rejected": True, "cause": "lost"}])
steps = st.none() | st.integers(0, 3)


@given(st.lists(st.tuples(proofs, steps), min_size=1, max_size=60))
def test_faults_of_different_nodes_never_end_a_run_and_never_walk_back(story: list[tuple[dict, int | None]]) -> None:  # type: ignore[type-arg]
    decisions = play([End(node=f"n{number}", steps=done, **proof) for number, (proof, done) in enumerate(story)])
    assert [decision.action for decision in decisions] == ["restart"] * len(story)
    assert {decision.max_checkpoint_step for decision in decisions} == {None}


@given(st.lists(st.tuples(st.integers(0, 9), steps, st.booleans()), min_size=1, max_size=30))
def test_no_failure_of_a_node_walks_back_from_the_newest_checkpoint(story: list[tuple[int, int | None, bool]]) -> None:
    ends = [End(node=f"n{node}", steps=done, rejected=rejected) for node, done, rejected in story]
    assert all(decision.max_checkpoint_step is None for decision in play(ends))


places = st.one_of(st.just(""), st.just("n0"), st.integers(0, 2000).map("n{}".format))


@given(st.lists(st.tuples(places, steps), min_size=40, max_size=40), st.lists(st.integers(0, 39), max_size=10))
def test_software_that_fails_always_ends_the_run_within_its_budgets(
    faults: list[tuple[str, int | None]], broken: list[int]
) -> None:
    ends = [End(node=node, steps=done) for node, done in faults]
    for at in broken:
        ends.insert(at, End(node="broken", cause="node_failed"))
    decisions = play(ends)
    assert decisions[-1].action == "stop"
    most = POLICY.max_restarts_without_progress + 1 + POLICY.max_nodes_without_progress
    assert len(decisions) <= most + len(broken)


def test_the_only_node_is_never_to_blame() -> None:
    state = RunState(checkpoints=[10, 20])
    for number in range(1, 6):
        state.attempts.append(AttemptState(number, {}, 0.0, resumed_from_step=20, last_step=20 + number))
        decision = decide(state, Ending(cause="killed", evidence=SIGNAL, hosts=("here",)), replace(POLICY))
        state.attempts[-1].blamed_hosts = ["here"]
    assert decision.why.startswith("3 restarts in a row made no new checkpoint")
