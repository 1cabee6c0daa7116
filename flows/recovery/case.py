"""What the restart policy knows at the end of a training attempt: the columns of its table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import NODE_CAUSES, Cause, Ending, without_hosts
from hlatctl.run.state import AttemptState, RunState

#: Causes that never count as repeated: they come from outside of the job, leave no trace that could be compared, or the
#: attempt excluded a batch.
_NEVER_REPEATED: frozenset[Cause] = frozenset({"preempted", "time_limit", "node_failed", "lost", "rollback"})


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the rows of the policy test: the newest attempt and its run.

    Args:
        step: the first step that the attempt did not finish.
        several: the run has more than one node.
        begun: it loaded and started to train.
        made_a_step: it finished at least one step.
        repeats: attempts that ended at the same step with the same signature, including this one; without those that
            a node's fault explains. Of attempts that failed to start, only those since the last new checkpoint: in a
            long run starts fail for many reasons.
        out_of_memory: attempts that ran out of memory since the last attempt with a new checkpoint, including both.
        no_progress: newest attempts in a row without a new checkpoint.
        unexplained: those of them that software may have caused: without a node to blame, or with the same node again.
        suspected: different nodes that the others of them blame, although preflight has not rejected them.
        nodes: to blame for this end, if there are several.
        newest, earlier: the checkpoint that the next attempt would load, and the one before; 0 and None: none.
        ceiling: checkpoints above this one were left behind by a walk back.
        batch: of the failing step; None: unknown.
        left_out: hosts that the node ledger leaves out from now on.
    """

    cause: Cause
    evidence: str
    several: bool
    stop_requested: bool
    step: int
    begun: bool
    made_a_step: bool
    repeats: int
    out_of_memory: int
    no_progress: int
    unexplained: int
    suspected: int
    nodes: tuple[str, ...]
    newest: int
    earlier: int | None
    ceiling: int | None
    batch: int | None
    left_out: tuple[str, ...]
    limit: int
    node_limit: int
    enabled: bool

    @property
    def start(self) -> str:
        """Where the next attempt starts."""
        return f"from step {self.newest}" if self.newest else "from the beginning"

    @property
    def place(self) -> str:
        """What the attempt did not finish."""
        return f"step {self.step}" if self.begun else "its start"

    @property
    def patience_key(self) -> str:
        """The key that says how long an attempt may be silent at this place."""
        return "recovery.hang_floor_s" if self.made_a_step else "recovery.start_timeout_s"

    @property
    def hosts(self) -> str:
        """The hosts that are left out, as text."""
        return ", ".join(self.left_out)

    @property
    def replaces_node(self) -> bool:
        """Whether the next attempt runs without a node that is to blame."""
        return not set(self.nodes).isdisjoint(self.left_out)

    @property
    def may_be_the_checkpoint(self) -> bool:
        """Whether an earlier checkpoint may help: no node is to blame, and no node could have ended it while loading.

        A start on one node says nothing about its hardware: there is no other to compare it with.
        """
        if self.cause == "storage_away":
            return False
        return not self.nodes and (self.begun or not self.several or self.cause not in NODE_CAUSES)


def history(state: RunState) -> list[AttemptState]:
    """Return the attempts that count: resuming a failed run, or amending one, resets its restart budget."""
    before = enumerate(state.attempts[:-1], start=1)
    resets = [i for i, attempt in before if attempt.decision == "stop" or attempt.cause == "amended"]
    return state.attempts[max(resets, default=0) :]


def failing_step(attempt: AttemptState) -> int:
    """Return the first step that an attempt did not finish."""
    return max(attempt.last_step, attempt.resumed_from_step or 0) + 1


def restarts_without_progress(state: RunState) -> int:
    """Return the number of newest attempts in a row without a checkpoint beyond all earlier ones."""
    best, count = 0, 0
    counting = len(state.attempts) - len(history(state))
    for number, attempt in enumerate(state.attempts):
        progress = attempt.newest_checkpoint > best
        best = max(best, attempt.newest_checkpoint)
        count = 0 if progress or number < counting else count + 1
    return count


def case_of(
    state: RunState,
    ending: Ending,
    config: RecoveryConfig,
    *,
    batch: int | None,
    left_out: tuple[str, ...],
    several: bool,
) -> Case:
    """Return the case of a run whose newest attempt has just ended."""
    attempt, past = state.attempts[-1], history(state)[:-1]
    no_progress = restarts_without_progress(state)
    since_progress = past[max(0, len(past) - no_progress) :] if no_progress else []
    ceiling, nodes = _ceiling(state), ending.hosts if several else ()
    usable = [checkpoint for checkpoint in state.checkpoints if ceiling is None or checkpoint <= ceiling]
    unexplained, suspected = _budgets(_streak(past, no_progress, several), ending, nodes, counts=no_progress > 0)
    return Case(
        cause=ending.cause,
        evidence=ending.evidence,
        several=several,
        stop_requested=state.stop_requested,
        step=failing_step(attempt),
        begun=attempt.resumed_from_step is not None,
        made_a_step=attempt.last_step > 0,
        repeats=_repeats(attempt, ending, past, since_progress),
        out_of_memory=(ending.cause == "out_of_memory") * (1 + sum(a.cause == "out_of_memory" for a in since_progress)),
        no_progress=no_progress,
        unexplained=unexplained,
        suspected=suspected,
        nodes=nodes,
        newest=usable[-1] if usable else 0,
        earlier=usable[-2] if len(usable) > 1 else None,
        ceiling=ceiling,
        batch=batch,
        left_out=left_out,
        limit=config.max_restarts_without_progress,
        node_limit=config.max_nodes_without_progress,
        enabled=config.enabled,
    )


def _explained(cause: str, blamed_hosts: Sequence[str], rejected_hosts: Sequence[str] = ()) -> bool:
    """Return whether others than the attempt found a node at fault: the scheduler, or a preflight after its end."""
    return bool(blamed_hosts) if cause == "node_failed" else cause in NODE_CAUSES and bool(rejected_hosts)


def _repeats(
    attempt: AttemptState, ending: Ending, past: Sequence[AttemptState], since_progress: Sequence[AttemptState]
) -> int:
    if ending.cause in _NEVER_REPEATED:
        return 1
    begun, step = attempt.resumed_from_step is not None, failing_step(attempt)
    at_start = attempt.last_step == 0

    def signature(text: str, hosts: Sequence[str]) -> str:
        # Two nodes may break in the same way at the start of an attempt, but hardly at the same later step.
        return text if at_start else without_hosts(text, hosts)

    own = signature(ending.signature, ending.hosts)
    return 1 + sum(
        signature(a.signature, a.blamed_hosts) == own
        and failing_step(a) == step
        and begun == (a.resumed_from_step is not None)
        and not _explained(a.cause, a.blamed_hosts, a.rejected_hosts)
        for a in (past if begun else since_progress)
    )


def _streak(past: Sequence[AttemptState], no_progress: int, several: bool) -> list[tuple[str, ...]]:
    """Return the nodes that earlier attempts without progress blame; without those that a node's fault explains."""
    earlier = past[len(past) - (no_progress - 1) :] if no_progress > 1 else []
    unexplained = [a for a in earlier if not _explained(a.cause, a.blamed_hosts, a.rejected_hosts)]
    return [tuple(a.blamed_hosts) if several else () for a in unexplained]


def _budgets(
    earlier: list[tuple[str, ...]], ending: Ending, nodes: tuple[str, ...], *, counts: bool
) -> tuple[int, int]:
    """Return how many attempts without progress software may have caused, and how many nodes the others blame."""
    blamed = [*earlier, nodes] if counts and not _explained(ending.cause, ending.hosts) else earlier
    seen: set[str] = set()
    unexplained = 0
    for hosts in blamed:
        unexplained += seen.issuperset(hosts)
        seen.update(hosts)
    return unexplained, len(seen)


def _ceiling(state: RunState) -> int | None:
    """Return the newest checkpoint since a walk back, until attempts pass the one that was left; None after that."""
    attempt = state.attempts[-1]
    if attempt.max_checkpoint_step is None:
        return None
    reached = max(attempt.max_checkpoint_step, attempt.newest_checkpoint)
    # If no checkpoint below is left, one that was left behind is better than none.
    below = [checkpoint for checkpoint in state.checkpoints if checkpoint <= reached]
    return reached if below and len(below) < len(state.checkpoints) else None
