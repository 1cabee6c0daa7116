"""The restart policy: decide what follows the end of a training attempt. Pure.

``decide`` takes the first row of the table ``POLICY`` that applies; ``hanging`` decides whether an attempt hangs. The
causes come from ``flows.recovery.failure_causes``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import Cause, Ending
from hlatctl.run.pace import median_step_s, newest_steps
from hlatctl.run.state import AttemptState, RunState

Action = Literal["done", "restart", "restart_without", "walk_back", "skip_data", "stop"]

#: Causes that never count as repeated: they come from outside of the job, or the attempt excluded a batch.
_NEVER_REPEATED: frozenset[Cause] = frozenset({"preempted", "time_limit", "node_failed", "rollback"})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next, and why in one sentence.

    Args:
        wait_s: before the next attempt.
        max_checkpoint_step: the next attempt loads no newer checkpoint; None: the newest.
        skip_batch: excluded from the next attempt on.
        hint: the command or edit that helps if the run stops.
    """

    action: Action
    why: str
    wait_s: float = 0.0
    max_checkpoint_step: int | None = None
    skip_batch: int | None = None
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the rows of the policy test: the newest attempt and its run.

    Args:
        step: the first step that the attempt did not finish.
        begun: it loaded and started to train.
        made_a_step: it finished at least one step.
        repeats: attempts that ended at the same step with the same signature, including this one. Of attempts that
            failed to start, only those since the last new checkpoint: in a long run starts fail for many reasons.
        out_of_memory: attempts that ran out of memory since the last attempt with a new checkpoint, including both.
        no_progress: newest attempts in a row without a new checkpoint.
        newest, earlier: the checkpoint that the next attempt would load, and the one before; 0 and None: none.
        ceiling: checkpoints above this one were left behind by a walk back.
        batch: of the failing step; None: unknown.
        left_out: hosts that the node ledger leaves out from now on.
    """

    cause: Cause
    evidence: str
    stop_requested: bool
    step: int
    begun: bool
    made_a_step: bool
    repeats: int
    out_of_memory: int
    no_progress: int
    newest: int
    earlier: int | None
    ceiling: int | None
    batch: int | None
    left_out: tuple[str, ...]
    limit: int
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
    def hosts(self) -> str:
        """The hosts that are left out, as text."""
        return ", ".join(self.left_out)


@dataclass(frozen=True)
class Row:
    """One row of the policy; ``why`` and ``hint`` are filled from the case."""

    action: Action
    when: Callable[[Case], bool]
    why: str
    hint: str = ""


#: The first row that applies counts.
POLICY: tuple[Row, ...] = (
    Row("done", lambda c: c.cause == "finished", "training is finished"),
    Row("stop", lambda c: c.cause == "stopped", "stopped on request after writing a checkpoint"),
    Row("stop", lambda c: c.cause == "error", "a restart can't fix this"),
    Row(
        "stop",
        lambda c: c.cause == "nonfinite",
        "a restart would compute the same numbers (train.on_nonfinite=rollback excludes such a batch)",
    ),
    Row("stop", lambda c: c.cause == "disk_full", "the disk would still be full after a restart", "free space"),
    Row("stop", lambda c: c.stop_requested, "stopped on request; it ended before it could write a checkpoint"),
    Row(
        "stop",
        lambda c: c.cause == "cancelled",
        "hlatctl did not cancel it, so it stops the run",
        "find out who cancelled the job",
    ),
    Row("stop", lambda c: not c.enabled, "nothing is restarted automatically (recovery.enabled=false)"),
    Row(
        "stop",
        lambda c: c.cause in ("crashed", "data_error") and not c.made_a_step and c.repeats == 1,
        "it crashed before its first step: a fault of code or configuration",
    ),
    Row(
        "stop",
        lambda c: c.out_of_memory >= 2,
        "out of memory again after a restart",
        "lower train.micro_batch_size, or set parallel.activation_checkpointing=full",
    ),
    Row(
        "stop",
        lambda c: c.repeats >= 3,
        "{c.place} has failed {c.repeats} times in the same way",
        "fix the cause, or exclude the batch with `hlatctl data skip RUN --steps {c.step}`",
    ),
    Row(
        "stop",
        lambda c: c.no_progress > c.limit and c.cause == "time_limit",
        "{c.limit} restarts in a row made no new checkpoint within the time limit",
        "raise cluster.slurm.time_limit_s, or lower checkpoint.every_steps",
    ),
    Row(
        "stop",
        lambda c: c.no_progress > c.limit,
        "{c.limit} restarts in a row made no new checkpoint (recovery.max_restarts_without_progress={c.limit})",
    ),
    Row(
        "skip_data",
        lambda c: c.repeats == 2 and c.cause == "data_error" and c.batch is not None,
        "step {c.step} has failed twice on its data: restarting {c.start} without batch {c.batch}",
    ),
    Row(
        "walk_back",
        lambda c: c.repeats == 2 and c.earlier is not None,
        "{c.place} has failed twice in the same way: walking back from checkpoint {c.newest} to {c.earlier}",
    ),
    Row("restart_without", lambda c: bool(c.left_out), "restarting {c.start} without {c.hosts}"),
    Row("restart", lambda c: True, "restarting {c.start}"),
)


def decide(
    state: RunState, ending: Ending, config: RecoveryConfig, *, batch: int | None = None, left_out: tuple[str, ...] = ()
) -> Decision:
    """Decide what follows the newest attempt.

    Args:
        state: the run; its newest attempt has just ended.
        ending: how it ended.
        config: the policy's limits.
        batch: number of the failing step's batch; None: unknown.
        left_out: hosts that the node ledger leaves out because of this end.
    """
    case = _case(state, ending, config, batch, left_out)
    row = next(row for row in POLICY if row.when(case))
    why, hint = row.why.format(c=case), row.hint.format(c=case)
    if row.action in ("done", "stop"):
        return Decision(action=row.action, why=why, hint=hint, max_checkpoint_step=case.ceiling)
    return Decision(
        action=row.action,
        why=why,
        hint=hint,
        wait_s=wait_s(case.no_progress, config),
        max_checkpoint_step=case.earlier if row.action == "walk_back" else case.ceiling,
        skip_batch=case.batch if row.action == "skip_data" else None,
    )


def hanging(state: RunState, silent_s: float, config: RecoveryConfig) -> str:
    """Return why the newest attempt counts as hung, in one sentence; empty: it doesn't.

    Args:
        silent_s: seconds since the trainer's last event, by the driver's clock.
    """
    attempt = state.attempts[-1]
    first_step = (attempt.resumed_from_step or 0) + 1
    median_s = median_step_s(event for event in newest_steps(state) if event["step"] >= first_step)
    if not attempt.last_step or median_s is None:
        limit_s = config.start_timeout_s
        sentence = f"no first step after {limit_s:g} s (recovery.start_timeout_s)"
    else:
        limit_s = max(config.hang_floor_s, config.hang_factor * median_s)
        sentence = (
            f"no step after step {attempt.last_step} for {limit_s:g} s, the recent median being {median_s:.3g} s "
            f"(recovery.hang_factor={config.hang_factor:g}, recovery.hang_floor_s={config.hang_floor_s:g})"
        )
    return sentence if silent_s > limit_s else ""


def history(state: RunState) -> list[AttemptState]:
    """Return the attempts that count: resuming a failed run resets its restart budget."""
    stopped = [i for i, attempt in enumerate(state.attempts[:-1], start=1) if attempt.decision == "stop"]
    return state.attempts[max(stopped, default=0) :]


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


def _case(
    state: RunState, ending: Ending, config: RecoveryConfig, batch: int | None, left_out: tuple[str, ...]
) -> Case:
    attempt, past = state.attempts[-1], history(state)[:-1]
    no_progress = restarts_without_progress(state)
    step, signature = failing_step(attempt), ending.signature
    since_progress = past[max(0, len(past) - no_progress) :] if no_progress else []
    begun = attempt.resumed_from_step is not None
    same = sum(
        a.signature == signature and failing_step(a) == step and begun == (a.resumed_from_step is not None)
        for a in (past if begun else since_progress)
    )
    ceiling = _ceiling(state)
    usable = [checkpoint for checkpoint in state.checkpoints if ceiling is None or checkpoint <= ceiling]
    return Case(
        cause=ending.cause,
        evidence=ending.evidence,
        stop_requested=state.stop_requested,
        step=step,
        begun=begun,
        made_a_step=attempt.last_step > 0,
        repeats=1 if ending.cause in _NEVER_REPEATED else same + 1,
        out_of_memory=(ending.cause == "out_of_memory") * (1 + sum(a.cause == "out_of_memory" for a in since_progress)),
        no_progress=no_progress,
        newest=usable[-1] if usable else 0,
        earlier=usable[-2] if len(usable) > 1 else None,
        ceiling=ceiling,
        batch=batch,
        left_out=left_out,
        limit=config.max_restarts_without_progress,
        enabled=config.enabled,
    )


def _ceiling(state: RunState) -> int | None:
    """Return the newest checkpoint since a walk back, until attempts pass the one that was left; None after that."""
    attempt = state.attempts[-1]
    if attempt.max_checkpoint_step is None:
        return None
    reached = max(attempt.max_checkpoint_step, attempt.newest_checkpoint)
    # If no checkpoint below is left, one that was left behind is better than none.
    below = [checkpoint for checkpoint in state.checkpoints if checkpoint <= reached]
    return reached if below and len(below) < len(state.checkpoints) else None


def wait_s(no_progress: int, config: RecoveryConfig) -> float:
    """Return the time to wait after so many failures in a row."""
    if not no_progress:
        return 0.0
    # 2**64 times the first delay is above any maximum; more would overflow a float.
    return float(min(config.backoff_s * 2.0 ** min(no_progress - 1, 64), config.max_backoff_s))
