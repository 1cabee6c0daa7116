"""The restart policy: decides what follows the end of a training attempt or of a stage's job. Pure.

``case_of`` computes what the policy knows at the end of an attempt. ``decide`` takes the first row of the table
``POLICY`` that applies to it; ``hanging`` decides whether an attempt hangs; ``decide_job`` decides for the jobs of
stages. The causes come from ``flows.recovery.failure_causes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import NODE_CAUSES, Cause, Ending, without_hosts
from hlatctl.run.errors import LaunchError
from hlatctl.run.events import IN_MEMORY
from hlatctl.run.memory import SAYS_NOTHING
from hlatctl.run.pace import median_step_s, newest_steps
from hlatctl.run.state import AttemptState, RunState

#: Causes that never count as repeated: they come from outside the job, leave no comparable trace, or the
#: attempt excluded a batch.
_NEVER_REPEATED: frozenset[Cause] = frozenset(
    {"preempted", "reclaimed", "time_limit", "node_failed", "lost", "rollback"}
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the rows of the policy test: the newest attempt and its run.

    Args:
        here: jobs run on the driver's machine.
        step: the first step that the attempt did not finish.
        begun: the attempt loaded and started to train.
        made_a_step: the attempt finished at least one step.
        repeats: number of attempts that ended at the same step with the same signature, including this one, without
            those that a faulty node explains. Attempts that failed to start count only since the last new checkpoint:
            in a long run, starts fail for many reasons.
        out_of_memory: number of attempts that ran out of memory since the last attempt with a new checkpoint, including
            both.
        no_progress: number of newest attempts in a row without a new checkpoint.
        unexplained: number of these attempts that software may have ended: without a node to blame, or with the same
            node again.
        suspected: number of different nodes that the rest of these attempts blame, although preflight has not rejected
            them.
        newest, earlier: the checkpoint that the next attempt would load, and the one before; 0 and None: none.
        ceiling: checkpoints above this step are skipped after a walk back to earlier ones.
        batch: batch of the failing step; None: unknown.
        left_out: hosts that the node ledger leaves out from now on.
        in_memory: copies of later steps that nodes keep in memory may be used.
    """

    cause: Cause
    evidence: str
    several: bool
    here: bool
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
    in_memory: bool
    limit: int
    node_limit: int
    enabled: bool

    @property
    def start(self) -> str:
        """Where the next attempt starts."""
        where = f"from step {self.newest}" if self.newest else "from the beginning"
        return f"{where} or a later step in memory" if self.in_memory else where

    @property
    def place(self) -> str:
        """What the attempt did not finish."""
        return f"step {self.step}" if self.begun else "its start"

    @property
    def patience_key(self) -> str:
        """The configuration key that limits how long an attempt may be silent at this place."""
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
        """Whether an earlier checkpoint may help: no node is to blame or could have ended the attempt while loading.

        A start on one node reveals nothing about its hardware: there is no other node to compare with.
        """
        if self.cause == "storage_away":
            return False
        return not self.nodes and (self.begun or not self.several or self.cause not in NODE_CAUSES)


def history(state: RunState) -> list[AttemptState]:
    """Return the attempts that count: resuming a failed run, an amendment and the end of a stage reset the budget."""
    before = enumerate(state.attempts[:-1], start=1)
    resets = [i for i, attempt in before if attempt.decision == "stop" or attempt.cause in ("amended", "stage")]
    return state.attempts[max(resets, default=0) :]


def failing_step(attempt: AttemptState) -> int:
    """Return the first step that an attempt did not finish."""
    return max(attempt.last_step, attempt.resumed_from_step or 0) + 1


def restarts_without_progress(state: RunState) -> int:
    """Return the number of newest attempts in a row without a checkpoint, or a step in memory, beyond earlier ones."""
    best, count = 0, 0
    counting = len(state.attempts) - len(history(state))
    for number, attempt in enumerate(state.attempts):
        # What an attempt continues from memory, the one before it has not done in vain.
        kept = (attempt.resumed_from_step or 0) if attempt.starting.get("restored_from") in IN_MEMORY else 0
        reached = max(attempt.newest_checkpoint, kept)
        progress = reached > best
        best = max(best, reached)
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
    here: bool = False,
    in_memory: bool = False,
) -> Case:
    """Return the case of a run whose newest attempt has just ended."""
    attempt, past = state.attempts[-1], history(state)[:-1]
    no_progress = restarts_without_progress(state)
    since_progress = past[max(0, len(past) - no_progress) :] if no_progress else []
    ceiling, nodes = _ceiling(state, ending.cause), ending.hosts if several else ()
    usable = [checkpoint for checkpoint in state.checkpoints if ceiling is None or checkpoint <= ceiling]
    unexplained, suspected = _budgets(_streak(past, no_progress, several), ending, nodes, counts=no_progress > 0)
    return Case(
        cause=ending.cause,
        evidence=ending.evidence,
        several=several,
        here=here,
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
        in_memory=in_memory and ending.cause in SAYS_NOTHING,
        limit=config.max_restarts_without_progress,
        node_limit=config.max_nodes_without_progress,
        enabled=config.enabled,
    )


def _explained(cause: str, blamed_hosts: Sequence[str], rejected_hosts: Sequence[str] = ()) -> bool:
    """Return whether the scheduler, or a preflight after the attempt's end, found a node at fault."""
    return bool(blamed_hosts) if cause == "node_failed" else cause in NODE_CAUSES and bool(rejected_hosts)


def _repeats(
    attempt: AttemptState, ending: Ending, past: Sequence[AttemptState], since_progress: Sequence[AttemptState]
) -> int:
    if ending.cause in _NEVER_REPEATED:
        return 1
    begun, step = attempt.resumed_from_step is not None, failing_step(attempt)
    at_start = attempt.last_step == 0

    def signature(text: str, hosts: Sequence[str]) -> str:
        # Two nodes may break in the same way at the start of an attempt, but are unlikely to at the same later step.
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
    """Return the nodes that earlier attempts without progress blame, without attempts that a faulty node explains."""
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


def _ceiling(state: RunState, cause: Cause) -> int | None:
    """Return the newest checkpoint since a walk back, until attempts pass the skipped one; None after that.

    After ``corruption`` only checkpoints up to the newest check without differences are trusted; 0: none, so the run
    begins again.
    """
    attempt, trusted = state.attempts[-1], state.trusted_step
    if cause == "corruption" and trusted is not None and (trusted == 0 or any(c <= trusted for c in state.checkpoints)):
        return trusted
    if attempt.max_checkpoint_step is None:
        return None
    reached = max(attempt.max_checkpoint_step, attempt.newest_checkpoint)
    if reached == 0:
        return 0
    # If no checkpoint below is left, use a skipped one rather than none.
    below = [checkpoint for checkpoint in state.checkpoints if checkpoint <= reached]
    return reached if below and len(below) < len(state.checkpoints) else None


Action = Literal["done", "restart", "restart_without", "walk_back", "skip_data", "stop"]

#: Minimum time for an attempt's processes to end after training, however short ``recovery.hang_floor_s`` is.
_LEAVE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next, and why in one sentence.

    Args:
        max_checkpoint_step: the next attempt loads no newer checkpoint; None: the newest.
        skip_batch: batch to exclude from the next attempt on.
        hint: the command or edit that helps if the run stops.
    """

    action: Action
    why: str
    wait_s: float = 0.0
    max_checkpoint_step: int | None = None
    skip_batch: int | None = None
    hint: str = ""


@dataclass(frozen=True)
class PolicyRule:
    """One row of the policy; ``why`` and ``hint`` are filled in from the case."""

    action: Action
    when: Callable[[Case], bool]
    why: str
    hint: str = ""


#: The first row that applies counts.
POLICY: tuple[PolicyRule, ...] = (
    PolicyRule("done", lambda c: c.cause == "finished", "training is finished"),
    PolicyRule("stop", lambda c: c.cause == "stopped", "stopped on request after writing a checkpoint"),
    PolicyRule("stop", lambda c: c.cause == "budget", "the run's budget is used up"),
    PolicyRule("stop", lambda c: c.cause == "error", "a restart can't fix this"),
    PolicyRule(
        "stop",
        lambda c: c.cause == "nonfinite",
        "a restart would compute the same numbers (train.on_nonfinite=rollback excludes such a batch)",
    ),
    PolicyRule("stop", lambda c: c.cause == "disk_full", "the disk would still be full after a restart", "free space"),
    PolicyRule("stop", lambda c: c.stop_requested, "stopped on request; it ended before it could write a checkpoint"),
    PolicyRule(
        "stop",
        lambda c: c.cause == "cancelled",
        "hlatctl did not cancel it, so it stops the run",
        "find out who cancelled the job",
    ),
    PolicyRule(
        "stop",
        lambda c: c.cause == "reclaimed" and c.here,
        "this machine is taken back, and nothing can be restarted on it",
        "resume the run on another machine, or on this one when it is back",
    ),
    PolicyRule("restart", lambda c: c.cause == "amended", "restarting {c.start} with the amendment"),
    PolicyRule("restart", lambda c: c.cause == "stage", "the next stage begins {c.start}"),
    PolicyRule(
        "stop",
        lambda c: not c.enabled and c.cause != "evaluation",
        "nothing is restarted automatically (recovery.enabled=false)",
    ),
    PolicyRule(
        "stop",
        lambda c: c.cause in ("crashed", "data_error") and not c.made_a_step and c.repeats == 1,
        "it crashed before its first step: a fault of code or configuration",
    ),
    PolicyRule(
        "stop",
        lambda c: c.out_of_memory >= 2,
        "out of memory again after a restart",
        "lower train.micro_batch_size, or set parallel.activation_checkpointing=full",
    ),
    PolicyRule(
        "stop",
        lambda c: c.repeats >= 3 and c.cause == "storage_away",
        "the corpus in object storage could not be read {c.repeats} times",
        "check the storage and the credentials",
    ),
    PolicyRule(
        "stop",
        lambda c: c.repeats >= 3 and not c.replaces_node and c.cause == "hang",
        "{c.place} has failed {c.repeats} times in the same way",
        "see the stacks in the logs; if it only needs longer, raise {c.patience_key}",
    ),
    PolicyRule(
        "stop",
        lambda c: c.repeats >= 3 and not c.replaces_node,
        "{c.place} has failed {c.repeats} times in the same way",
        "fix the cause, or exclude the batch with `hlatctl data skip RUN --steps {c.step}`",
    ),
    PolicyRule(
        "stop",
        lambda c: c.unexplained > c.limit and c.cause == "time_limit",
        "{c.limit} restarts in a row made no new checkpoint within the time limit",
        "raise cluster.slurm.time_limit_s, or lower checkpoint.every_steps",
    ),
    PolicyRule(
        "stop",
        lambda c: c.unexplained > c.limit,
        "{c.limit} restarts in a row made no new checkpoint (recovery.max_restarts_without_progress={c.limit})",
    ),
    PolicyRule(
        "stop",
        lambda c: c.suspected > c.node_limit,
        "{c.suspected} nodes failed without a new checkpoint, and preflight found no fault in them "
        "(recovery.max_nodes_without_progress={c.node_limit})",
        "look for a fault of software in the logs of these attempts",
    ),
    PolicyRule(
        "skip_data",
        lambda c: c.repeats == 2 and c.cause == "data_error" and c.batch is not None,
        "step {c.step} has failed twice on its data: restarting {c.start} without batch {c.batch}",
    ),
    PolicyRule(
        "walk_back",
        lambda c: c.repeats == 2 and c.earlier is not None and c.may_be_the_checkpoint,
        "{c.place} has failed twice in the same way: walking back from checkpoint {c.newest} to {c.earlier}",
    ),
    PolicyRule("restart", lambda c: c.cause == "evaluation", "restarting {c.start} after the evaluation"),
    PolicyRule("restart_without", lambda c: bool(c.left_out), "restarting {c.start} without {c.hosts}"),
    PolicyRule("restart", lambda c: True, "restarting {c.start}"),
)


def decide(
    state: RunState,
    ending: Ending,
    config: RecoveryConfig,
    *,
    batch: int | None = None,
    left_out: tuple[str, ...] = (),
    several: bool = False,
    here: bool = False,
    in_memory: bool = False,
) -> Decision:
    """Decide what follows the newest attempt.

    Args:
        several: the run has more than one node. A single node is never blamed: hardware and software faults look alike.
        here: jobs run on the driver's machine.
        in_memory: the nodes keep copies of steps in memory.
    """
    case = case_of(
        state, ending, config, batch=batch, left_out=left_out, several=several, here=here, in_memory=in_memory
    )
    row = next(row for row in POLICY if row.when(case))
    why, hint = row.why.format(c=case), row.hint.format(c=case)
    if row.action in ("done", "stop"):
        return Decision(action=row.action, why=why, hint=hint, max_checkpoint_step=case.ceiling)
    return Decision(
        action=row.action,
        why=why,
        hint=hint,
        wait_s=0.0 if case.cause in ("amended", "stage", "evaluation") else wait_s(case.no_progress, config),
        max_checkpoint_step=case.earlier if row.action == "walk_back" else case.ceiling,
        skip_batch=case.batch if row.action == "skip_data" else None,
    )


def hanging(state: RunState, silent_s: float, config: RecoveryConfig) -> str:
    """Return why the newest attempt counts as hung, in one sentence; empty: it doesn't.

    Args:
        silent_s: seconds since the trainer's last event, by the driver's clock.
    """
    attempt = state.attempts[-1]
    if state.train_stopped:
        limit_s = max(config.hang_floor_s, _LEAVE_S)
        return f"training has stopped, but its processes have not ended for {limit_s:g} s" * (silent_s > limit_s)
    first_step = (attempt.resumed_from_step or 0) + 1
    median_s = median_step_s(event for event in newest_steps(state) if event["step"] >= first_step)
    if not attempt.last_step or median_s is None:
        limit_s = config.start_timeout_s
        sentence = f"no first step after {limit_s:g} s (recovery.start_timeout_s)"
    else:
        limit_s = max(config.hang_floor_s, (config.hang_factor + attempt.log_freq - 1) * median_s)
        sentence = (
            f"no step after step {attempt.last_step} for {limit_s:g} s, the recent median being {median_s:.3g} s"
            f"{f' and one step in {attempt.log_freq} being journalled' * (attempt.log_freq > 1)} "
            f"(recovery.hang_factor={config.hang_factor:g}, recovery.hang_floor_s={config.hang_floor_s:g})"
        )
    return sentence if silent_s > limit_s else ""


def wait_s(no_progress: int, config: RecoveryConfig) -> float:
    """Return the seconds to wait after this many failures in a row."""
    if not no_progress:
        return 0.0
    # 2**64 times the first delay is above any maximum; more would overflow a float.
    return float(min(config.backoff_s * 2.0 ** min(no_progress - 1, 64), config.max_backoff_s))


#: Ends that come from outside, without a faulty node.
_OUTSIDE = ("preempted", "reclaimed", "time_limit", "port_in_use")


def decide_job(ends: Sequence[LaunchError], config: RecoveryConfig) -> Decision:
    """Decide what follows the end of a stage's job, with the limits and delays of training's attempts.

    A job is restarted after a signal, after a time-out of a collective, if it was lost or hung, if a node, a device or
    the network failed, or if the scheduler ended it or its port was taken. After running out of memory it is restarted
    once. A cancellation by somebody stops the run.

    Args:
        ends: errors of the stage's jobs in this flow that left no error of their own, newest last.
    """
    newest, limit = ends[-1], config.max_restarts_without_progress
    alike = sum(end.code == newest.code for end in ends)
    if newest.code == "cancelled":
        return Decision(action="stop", why="hlatctl did not cancel it, so it stops the run")
    if newest.code not in (*NODE_CAUSES, *_OUTSIDE, "out_of_memory"):
        return Decision(action="stop", why="a restart can't fix this")
    if not config.enabled:
        return Decision(action="stop", why="nothing is restarted automatically (recovery.enabled=false)")
    if newest.code == "out_of_memory" and alike > 1:
        return Decision(action="stop", why="out of memory again after a restart")
    if len(ends) > limit:
        return Decision(
            action="stop", why=f"{limit} restarts did not help (recovery.max_restarts_without_progress={limit})"
        )
    return Decision(action="restart", why="restarting", wait_s=wait_s(len(ends), config))
