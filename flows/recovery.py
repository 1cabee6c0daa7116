"""What follows when a training attempt ends: a pure function of what the journal and the job's end say.

``classify`` names the cause; ``decide`` chooses. Nothing here reads a file, sleeps or starts anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from conf.schema import RecoveryConfig
from flows.launch.base import Status
from hlatctl.run.errors import HlatctlError
from hlatctl.run.state import RunState

#: How torchrun marks a line with the process it comes from.
_RANK_PREFIX = re.compile(r"^(\[[\w.]*\d+\]: ?)+")
Cause = Literal["finished", "stopped", "rollback", "error", "killed", "crashed", "lost"]
#: How torchrun's summary of a failure names a process's end; negative is a signal.
_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended.

    Args:
        cause: ``stopped`` wrote a checkpoint because it was asked to; ``rollback`` met a step that was not finite and
            wants to go back to the newest checkpoint, without that step's batch; ``error`` left an error that a person
            must mend; ``killed`` died of a signal; ``crashed`` of an exception; ``lost`` is gone without a trace.
        evidence: what says so, in one line.
    """

    cause: Cause
    evidence: str
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next, and why in one sentence."""

    action: Literal["done", "restart", "stop"]
    why: str
    wait_s: float = 0.0


def classify(*, status: Status, train_stopped: str, error: HlatctlError | None, log_tail: str) -> Ending:
    """Name the cause of an attempt's end.

    Args:
        status: of the ended job.
        train_stopped: the reason in the trainer's last event, or empty.
        error: what the job left behind for a person.
        log_tail: the last lines of its log.
    """
    code = status.exit_code
    if train_stopped == "finished":
        return Ending(cause="finished", evidence="the last step and its checkpoint are written", exit_code=code)
    if error:
        return Ending(cause="error", evidence=f"{type(error).__name__}: {error.message}", exit_code=code)
    if train_stopped == "stop":
        return Ending(cause="stopped", evidence="asked to stop; checkpoint written", exit_code=code)
    if train_stopped == "rollback":
        return Ending(cause="rollback", evidence="a step was not finite; its batch is left out", exit_code=code)
    if status.state == "lost":
        return Ending(cause="lost", evidence="the job's process is gone and left no exit code")
    signals = [-int(found) for found in _EXIT_CODE.findall(log_tail) if int(found) < 0]
    if signals:
        return Ending(cause="killed", evidence=f"a trainer process died of signal {signals[0]}", exit_code=code)
    if code is not None and code > 128:
        return Ending(cause="killed", evidence=f"the job died of signal {code - 128}", exit_code=code)
    return Ending(cause="crashed", evidence=last_exception(log_tail), exit_code=code)


def decide(state: RunState, ending: Ending, config: RecoveryConfig) -> Decision:
    """Choose what follows the newest attempt.

    Args:
        state: the run, its attempts ending with the one that has just ended.
        ending: how it ended.
        config: the policy's limits.
    """
    attempt = state.attempts[-1]
    if ending.cause == "finished":
        return Decision(action="done", why="training is finished")
    if ending.cause == "stopped" and state.stop_requested:
        return Decision(action="stop", why="stopped on request after writing a checkpoint")
    if ending.cause == "error":
        return Decision(action="stop", why="a restart can not mend this")
    if ending.cause == "crashed" and attempt.last_step == 0:
        return Decision(action="stop", why="it crashed before its first step: a fault of code or configuration")
    if state.stop_requested:
        return Decision(action="stop", why="stopped on request; it ended before it could write a checkpoint")
    failures = restarts_without_progress(state)
    limit = config.max_restarts_without_progress
    if failures > limit:
        return Decision(
            action="stop",
            why=f"{limit} restarts in a row gained no checkpoint (recovery.max_restarts_without_progress={limit})",
        )
    from_step = state.checkpoints[-1] if state.checkpoints else 0
    where = f"from step {from_step}" if from_step else "from the beginning"
    wait_s = min(config.backoff_s * 2 ** (failures - 1), config.max_backoff_s) if failures else 0.0
    return Decision(action="restart", why=f"restarting {where}", wait_s=wait_s)


def restarts_without_progress(state: RunState) -> int:
    """Attempts in a row, ending with the newest, that gained no checkpoint beyond the one they started from."""
    count = 0
    for attempt in reversed(state.attempts):
        if attempt.newest_checkpoint > (attempt.resumed_from_step or 0):
            break
        count += 1
    return count


def last_exception(log_tail: str) -> str:
    """The line of a log that names the exception, or else its last line."""
    lines = [_RANK_PREFIX.sub("", line).strip() for line in log_tail.splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines or ["no output"])[-1][:500]
