"""What follows when a training attempt ends: a pure function of the journal and of how it ended.

``decide`` goes down the table ``POLICY``, whose first row that applies counts; ``hanging`` says when an attempt has to
be ended. Nothing here reads a file, sleeps or starts anything. The cause is named by ``flows.recovery.failure_causes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import NODE_CAUSES, Cause, Ending
from hlatctl.run.errors import LaunchError
from hlatctl.run.pace import median_step_s, newest_steps
from hlatctl.run.state import AttemptState, RunState

Action = Literal["done", "restart", "restart_without", "walk_back", "skip_data", "stop"]

#: Causes that leave nothing to compare: each of their attempts has written a checkpoint or left a batch out.
_NEVER_THE_SAME: frozenset[Cause] = frozenset({"preempted", "rollback"})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next, and why in one sentence.

    Args:
        wait_s: before the next attempt.
        max_checkpoint_step: the next attempt loads no newer checkpoint; none: the newest.
        skip_batch: to leave out from the next attempt on.
        hint: the command or edit that helps, where it ends here.
    """

    action: Action
    why: str
    wait_s: float = 0.0
    max_checkpoint_step: int | None = None
    skip_batch: int | None = None
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the rows of the policy look at.

    Args:
        step: that it did not finish.
        begun: it has loaded, and begun to train.
        made_a_step: at least one before it.
        repeats: attempts that ended like this one: same step, same signature; this one counts. Of attempts that did
            not begin only those since one gained a checkpoint: a start fails for many reasons in the course of a run.
        out_of_memory: attempts with too little memory since one gained a checkpoint, that and this one included.
        no_progress: attempts in a row that gained no checkpoint beyond the best before them.
        newest, earlier: the checkpoint that the next attempt would load, and the one before; 0, None: there is none.
        ceiling: a checkpoint above this belongs to steps that have been walked back over.
        batch: of the failing step; none if it isn't known.
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
        """Where the next attempt begins."""
        return f"from step {self.newest}" if self.newest else "from the beginning"

    @property
    def place(self) -> str:
        """What it did not finish."""
        return f"step {self.step}" if self.begun else "its start"

    @property
    def hosts(self) -> str:
        """Of ``left_out``, for people."""
        return ", ".join(self.left_out)


@dataclass(frozen=True)
class Row:
    """One row of the policy; ``why`` and ``hint`` are filled from the case."""

    action: Action
    when: Callable[[Case], bool]
    why: str
    hint: str = ""


#: Read from the top; the first row that applies counts.
POLICY: tuple[Row, ...] = (
    Row("done", lambda c: c.cause == "finished", "training is finished"),
    Row("stop", lambda c: c.cause == "stopped", "stopped on request after writing a checkpoint"),
    Row("stop", lambda c: c.cause == "error", "a restart can not mend this"),
    Row(
        "stop",
        lambda c: c.cause == "nonfinite",
        "a restart would meet the same numbers (train.on_nonfinite=rollback leaves such a batch out)",
    ),
    Row("stop", lambda c: c.cause == "disk_full", "a restart would find the disk as full", "free space"),
    Row("stop", lambda c: c.stop_requested, "stopped on request; it ended before it could write a checkpoint"),
    Row("stop", lambda c: not c.enabled, "nothing is restarted by itself (recovery.enabled=false)"),
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
        "mend what the evidence names, or leave the batch out with `hlatctl data skip RUN --steps {c.step}`",
    ),
    Row(
        "stop",
        lambda c: c.no_progress > c.limit,
        "{c.limit} restarts in a row gained no checkpoint (recovery.max_restarts_without_progress={c.limit})",
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
    """Choose what follows the newest attempt.

    Args:
        state: the run, its attempts ending with the one that has just ended.
        ending: how it ended.
        config: the policy's limits.
        batch: number of the batch that the failing step trains on, if it is known.
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
        wait_s=_wait_s(case.no_progress, config),
        max_checkpoint_step=case.earlier if row.action == "walk_back" else case.ceiling,
        skip_batch=case.batch if row.action == "skip_data" else None,
    )


def decide_job(ends: Sequence[LaunchError], config: RecoveryConfig) -> Decision:
    """Choose what follows the end of a stage's job, by the limits and the back-off of training's attempts.

    Only what may go well another time is done again: an end by a signal, a lost or hung job, a time-out of the
    processes' exchange, and once too little memory.

    Args:
        ends: of the stage's jobs in this flow that left no error of their own, the newest last.
        config: the policy's limits.
    """
    newest, limit = ends[-1], config.max_restarts_without_progress
    alike = sum(end.cause == newest.cause for end in ends)
    if newest.cause not in (*NODE_CAUSES, "out_of_memory"):
        return Decision(action="stop", why="a restart can't fix this")
    if not config.enabled:
        return Decision(action="stop", why="nothing is restarted automatically (recovery.enabled=false)")
    if newest.cause == "out_of_memory" and alike > 1:
        return Decision(action="stop", why="out of memory again after a restart")
    if len(ends) > limit:
        return Decision(
            action="stop", why=f"{limit} restarts did not help (recovery.max_restarts_without_progress={limit})"
        )
    return Decision(action="restart", why="restarting", wait_s=_wait_s(len(ends), config))


def hanging(state: RunState, silent_s: float, config: RecoveryConfig) -> str:
    """Why the newest attempt has to be taken for hung, in one sentence; empty while it need not be.

    Args:
        silent_s: since the trainer's last event, by the clock of whoever watches.
    """
    attempt = state.attempts[-1]
    first_step = (attempt.resumed_from_step or 0) + 1
    median_s = median_step_s(event for event in newest_steps(state) if event["step"] >= first_step)
    if not attempt.last_step or median_s is None:
        limit_s = config.start_timeout_s
        said = f"no first step after {limit_s:g} s (recovery.start_timeout_s)"
    else:
        limit_s = max(config.hang_floor_s, config.hang_factor * median_s)
        said = (
            f"no step after step {attempt.last_step} for {limit_s:g} s, the recent median being {median_s:.3g} s "
            f"(recovery.hang_factor={config.hang_factor:g}, recovery.hang_floor_s={config.hang_floor_s:g})"
        )
    return said if silent_s > limit_s else ""


def history(state: RunState) -> list[AttemptState]:
    """The attempts that count: a person who resumes a run that was given up gives it a new budget."""
    given_up = [i for i, attempt in enumerate(state.attempts[:-1], start=1) if attempt.decision == "stop"]
    return state.attempts[max(given_up, default=0) :]


def failing_step(attempt: AttemptState) -> int:
    """The step that an attempt did not finish."""
    return max(attempt.last_step, attempt.resumed_from_step or 0) + 1


def restarts_without_progress(state: RunState) -> int:
    """Attempts in a row, ending with the newest, that gained no checkpoint beyond all before them."""
    best, count = 0, 0
    counting = len(state.attempts) - len(history(state))
    for number, attempt in enumerate(state.attempts):
        gained = attempt.newest_checkpoint > best
        best = max(best, attempt.newest_checkpoint)
        count = 0 if gained or number < counting else count + 1
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
        repeats=1 if ending.cause in _NEVER_THE_SAME else same + 1,
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
    """After a walk back, until its attempts have passed the checkpoint that was left: what they have reached."""
    attempt = state.attempts[-1]
    if attempt.max_checkpoint_step is None:
        return None
    reached = max(attempt.max_checkpoint_step, attempt.newest_checkpoint)
    # If all below has been lost since, what was left behind is better than nothing.
    below = [checkpoint for checkpoint in state.checkpoints if checkpoint <= reached]
    return reached if below and len(below) < len(state.checkpoints) else None


def _wait_s(no_progress: int, config: RecoveryConfig) -> float:
    if not no_progress:
        return 0.0
    # 2**64 times anything is above any maximum; more would not fit a float.
    return float(min(config.backoff_s * 2.0 ** min(no_progress - 1, 64), config.max_backoff_s))
