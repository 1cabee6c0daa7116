"""What the journal says of a run, as plain data: its stages, attempts, steps, checkpoints and milestones.

``hlatctl.run.fold`` makes it from events; it is never stored. Whether the process that drives the run is alive is not
in the journal; ``hlatctl.run.lease`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hlatctl.run.journal import Event, number


@dataclass
class StageState:
    """One stage of the flow: ``running``, ``finished``, ``skipped`` or ``failed``."""

    name: str
    status: str
    fingerprint: str = ""
    wall_s: float = 0.0
    message: str = ""


@dataclass
class AttemptState:
    """One training attempt.

    Args:
        resumed_from_step: None until the trainer has started.
        cause, evidence: why it ended, and what shows it; empty while it runs.
        last_step, newest_checkpoint: how far it came; 0 if it made no step, no checkpoint.
        signature: equal for two ends that are the same.
        hang: why the flow took it for hung; empty if it did not.
        max_checkpoint_step: it may load no newer checkpoint; none: any.
        next_max_checkpoint_step: the same, for its successor.
        oom_kills: that the kernel had done when it began, for want of memory; none if that can't be known.
        train_events: how many events its processes have written: a sign of life.
        stragglers: events that name a slow process.
    """

    number: int
    handle: dict[str, Any]
    started_unix_s: float
    resumed_from_step: int | None = None
    ended_unix_s: float | None = None
    cause: str = ""
    evidence: str = ""
    decision: str = ""
    why: str = ""
    last_step: int = 0
    newest_checkpoint: int = 0
    compile_cache: dict[str, Any] | None = None
    signature: str = ""
    hang: str = ""
    max_checkpoint_step: int | None = None
    next_max_checkpoint_step: int | None = None
    oom_kills: int | None = None
    train_events: int = 0
    stragglers: list[Event] = field(default_factory=list)


@dataclass
class Judgement:
    """The scores of one evaluation, and what they were measured under: empty if the journal does not say."""

    contract: str
    scores: dict[str, dict[str, Any]]
    skipped: dict[str, str]


@dataclass
class EvaluationProgress:
    """How far an evaluation has come.

    Args:
        tasks: all of its tasks, in order.
        task: the one that runs, or ran last.
        done, total: its requests that are answered, and all; 0 if nothing is known yet.
        task_started_unix_s, updated_unix_s: when the task began, and when ``done`` was counted.
        done_before: requests that an earlier try had answered.
        counted: when so many were answered, newest last; the first is the first answer of this try.
    """

    tasks: list[str]
    task: str = ""
    done: int = 0
    total: int = 0
    done_before: int | None = None
    task_started_unix_s: float = 0.0
    updated_unix_s: float = 0.0
    counted: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class MilestoneState:
    """One milestone: ``due``, ``running``, ``evaluated`` or ``failed``.

    Args:
        scores, skipped: under the run's first contract; where it was evaluated under others only, the newest.
        contract: what the scores were measured under; empty if the journal does not say.
        judgements: all its evaluations, by contract.
        last_failure: why an evaluation of it failed last, whatever came later.
        progress: of an evaluation that is under way.
    """

    milestone_tokens: int
    step: int
    status: str = "due"
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    contract: str = ""
    message: str = ""
    judgements: dict[str, Judgement] = field(default_factory=dict)
    last_failure: str = ""
    progress: EvaluationProgress | None = None

    @property
    def others(self) -> list[Judgement]:
        """Evaluations under other contracts than the one whose scores are shown."""
        return [judgement for contract, judgement in self.judgements.items() if contract != self.contract]


@dataclass
class RunState:
    """What the journal says of a run.

    Args:
        status: ``created``, ``running``, ``finished``, ``failed`` or ``stopped``.
        sweep: that it is a trial of; empty if of none.
        argv: the command line that made the run.
        steps: the step events that count, by step; superseded ones are left out.
        peak_flops_per_s: of one of the devices trained on; none if it isn't known.
        checkpoints: steps of the checkpoints that were committed and neither rejected nor deleted.
        evaluates: the model from elsewhere that this run does nothing but evaluate; empty for a training run.
        contract: of the first evaluation that names one, which the run's scores are shown under; empty before it.
        spikes: events that a spike began with; of one that has ended they also have ``length_steps``.
        trust: how far each of these is trusted: ``committed``, ``verified`` (read again) or ``survived`` (healthy steps
            came after it).
    """

    run_id: str = ""
    status: str = "created"
    simulated: bool = False
    argv: list[str] = field(default_factory=list)
    evaluates: str = ""
    sweep: str = ""
    contract: str = ""
    created_unix_s: float = 0.0
    last_event_unix_s: float = 0.0
    stages: dict[str, StageState] = field(default_factory=dict)
    attempts: list[AttemptState] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)
    peak_flops_per_s: float | None = None
    checkpoints: list[int] = field(default_factory=list)
    trust: dict[int, str] = field(default_factory=dict)
    milestones: dict[int, MilestoneState] = field(default_factory=dict)
    spikes: list[Event] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    train_stopped: str = ""
    stop_requested: bool = False
    message: str = ""

    @property
    def last_step(self) -> Event | None:
        """The newest step that counts."""
        return self.steps[max(self.steps)] if self.steps else None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max(self.steps, default=0)

    @property
    def tokens(self) -> int:
        """Tokens that the optimizer has consumed."""
        last = self.last_step
        return int(last["tokens"]) if last else 0

    @property
    def attempt(self) -> AttemptState | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def running_stages(self) -> list[str]:
        """Names of the stages that are running."""
        return [stage.name for stage in self.stages.values() if stage.status == "running"]

    @property
    def validation_loss(self) -> float | None:
        """Loss on held-out text at the newest milestone that has one, in nats per token."""
        newest_first = (self.milestones[tokens].scores for tokens in sorted(self.milestones, reverse=True))
        score = next((scores["validation_loss"] for scores in newest_first if "validation_loss" in scores), None)
        return None if score is None else number(score, "value")
