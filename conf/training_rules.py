"""Rules that the trainer, the flows and the simulation share about training.

They are about saving and deleting checkpoints, exit codes, the learning rate, and how much rounding may change.

Everything here is pure. Milestones and permanent steps are properties of ``conf.schema.Config``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from conf.registries import SCHEDULES
from conf.schema import Config

SaveReason = Literal["final", "stop", "milestone", "permanent", "interval"]
#: A save for one of these reasons is never skipped: training ends with it, or an evaluation needs it.
REQUIRED: frozenset[SaveReason] = frozenset({"final", "stop", "milestone"})
#: Training waits until a save for one of these reasons is complete.
BLOCKING: frozenset[SaveReason] = frozenset({"final", "stop"})

#: Processors and devices round differently: the largest relative difference of a loss between two of them. Norms of
#: gradients and moments sum rounded values, so they differ more.
LOSS_TOLERANCE, NORM_TOLERANCE, TENSOR_TOLERANCE = 1e-3, 1e-2, 0.1


def relative_difference(now: float, then: float) -> float:
    """Return the relative difference of two numbers; infinite if they differ and one isn't finite."""
    difference = abs(now - then) / max(abs(then), 1e-12) if now != then else 0.0
    return difference if math.isfinite(difference) else math.inf


Outcome = Literal["finished", "stop", "rollback", "amend"]
#: Exit code of a training process that ends without an error. After ``stop`` (SIGTERM) and ``amend`` (the next attempt
#: begins with an amendment or another stage) a checkpoint has been written; after ``rollback`` the run continues from
#: the newest checkpoint. 75 is EX_TEMPFAIL of sysexits.h.
EXIT_CODES: dict[Outcome, int] = {"finished": 0, "stop": 75, "rollback": 76, "amend": 77}


class CheckpointPolicy:
    """When a run saves checkpoints, and which of them it deletes."""

    def __init__(self, config: Config) -> None:
        self._config, self._milestones = config, config.milestones

    def reason_to_save(self, step: int, *, stopping: bool = False) -> SaveReason | None:
        """Return why a checkpoint is saved after a step, or None if none is saved.

        Args:
            step: the completed step.
            stopping: training must stop after this step.
        """
        if step == self._config.total_steps:
            return "final"
        if stopping or self._config.ends_stage(step):
            return "stop"
        if step in self._milestones:
            return "milestone"
        if self._config.is_permanent(step):
            return "permanent"
        return None if step % self._config.checkpoint.every_steps else "interval"

    def next_save(self, step: int) -> int:
        """Return the first step after ``step`` with a reason to save; ``step`` is not the last one."""
        config, every_steps = self._config, self._config.checkpoint.every_steps
        stages = (stage.last_step for stage in config.stages if stage.last_step > step)
        return min((step // every_steps + 1) * every_steps, self.next_lasting(step), *stages)

    def next_lasting(self, step: int) -> int:
        """Return the first step after ``step`` with a checkpoint that something else needs: an evaluation, or a person.

        A restart that jumped over it would leave it out.
        """
        config, every_tokens = self._config, self._config.checkpoint.keep_every_tokens
        candidates = [config.total_steps, *(milestone for milestone in self._milestones if milestone > step)]
        if every_tokens:
            candidates.append(config.step_reaching((config.tokens_at(step) // every_tokens + 1) * every_tokens))
        return min(candidates)

    def to_delete(
        self,
        steps: Sequence[int],
        *,
        verified: Sequence[int],
        is_evaluated: Callable[[int], bool],
        keep: int | None = None,
    ) -> set[int]:
        """Return the checkpoints that are no longer needed.

        The newest ``checkpoint.keep`` stay, and also permanent checkpoints, milestones until they are evaluated, and
        the newest verified checkpoint.

        Args:
            steps: steps of the run's checkpoints, ascending, without rejected ones.
            verified: the steps whose checkpoints were read again after they were written, ascending.
            is_evaluated: returns whether the milestone of this many tokens is evaluated.
            keep: number of the newest to keep; None: ``checkpoint.keep``.
        """
        rolling = [step for step in steps if not self._is_protected(step, is_evaluated)]
        return {*rolling[: -(keep or self._config.checkpoint.keep)]} - {*verified[-1:]}

    def is_lasting(self, step: int) -> bool:
        """Return whether the remote folder keeps a checkpoint forever: a milestone or a permanent one."""
        return step in self._milestones or self._config.is_permanent(step)

    def _is_protected(self, step: int, is_evaluated: Callable[[int], bool]) -> bool:
        pending = step in self._milestones and not is_evaluated(self._milestones[step])
        return pending or self._config.is_permanent(step)


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of a step (1-based): linear warm-up to ``lr``, then the schedule to the final rate.

    The last step has exactly the final rate if the schedule reaches 0, as the built-in ones do. In a run with stages,
    it counts from the schedule's first step.
    """
    if stage := config.stage_at(step):
        step, config = step - stage.schedule_after_step, stage.schedule
    optimizer, warmup = config.optimizer, config.warmup_steps
    if step <= warmup:
        return optimizer.lr * step / warmup
    low = optimizer.lr * optimizer.min_lr_fraction
    return low + (optimizer.lr - low) * float(SCHEDULES.create(optimizer.schedule, step, config))


def _progress(step: int, start: int, config: Config) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, config.total_steps - start)))


def cosine(step: int, config: Config) -> float:
    """Return half a cosine from the warm-up to the end (HLAT, arXiv 2404.10630, section 4.1)."""
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, config.warmup_steps, config)))


def linear(step: int, config: Config) -> float:
    """Return a straight line from the warm-up to the end."""
    return 1.0 - _progress(step, config.warmup_steps, config)


def wsd(step: int, config: Config) -> float:
    """Return 1 (stable), and a straight line over the last steps (MiniCPM, arXiv 2404.06395, section 4)."""
    total = config.total_steps
    start = max(config.warmup_steps, last_stable_step(total, config.optimizer.wsd_decay_fraction))
    return 1.0 - _progress(step, start, config)


def last_stable_step(total_steps: int, decay_fraction: float) -> int:
    """Return the step after which `wsd` decays."""
    return total_steps - math.ceil(decay_fraction * total_steps)


def next_corruption_check(config: Config, step: int) -> int | None:
    """Return the first step, from this one on, after which the processes are compared; None: they never are."""
    every = config.recovery.corruption_check_steps
    return None if every is None else min(-(-step // every) * every, config.total_steps)
