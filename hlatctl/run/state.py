"""The state of a run as plain data: its stages, attempts, steps, checkpoints and milestones.

``hlatctl.run.fold`` computes it from the journal. The journal doesn't say whether the run's driver
is alive: ``hlatctl.run.lease`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from hlatctl.run.journal import Event
from hlatctl.run.labels import LabelState
from hlatctl.run.steps import StepSeries
from hlatctl.units import number

#: Name of the job that trains.
TRAIN_JOB = "train"
#: Jobs that run on the nodes that a run keeps for training. While one waits in a queue, the run holds no nodes.
_ON_NODES = (TRAIN_JOB, "preflight", "coverage")
#: Causes of ends that are no failures.
_NO_FAILURES = ("finished", "stopped", "budget", "amended", "stage", "evaluation")
#: ``code`` of a ``job_queued`` event: the job waits until a person repairs a node.
NO_SPARE_NODE = "no_spare_node"
#: Fields of a step's event that only the newest step keeps.
USED = ("mfu", "tokens_per_s_per_device", "memory_bytes", "peak_memory_bytes")
#: Newest counts of an evaluation's answers that are kept, two seconds apart. They give its pace.
_COUNTS_KEPT = 30


@dataclass
class StageState:
    """One stage of the flow: ``running``, ``finished``, ``skipped`` or ``failed``."""

    name: str
    status: str
    fingerprint: str = ""
    wall_s: float = 0.0
    message: str = ""
    outputs: dict[str, Any] = field(default_factory=dict)
    """Of the last time that it finished."""


@dataclass
class AttemptState:
    """One training attempt.

    Args:
        resumed_from_step: None until the trainer has started.
        cause, evidence: why the attempt ended, and the evidence; empty while it runs.
        log_freq: steps between two that the engine journals.
        last_step, newest_checkpoint: its last step and checkpoint; 0 if there is none.
        signature: equal for attempts that ended in the same way.
        hang: why the flow considered it hung; empty if it did not hang.
        max_checkpoint_step: step of the newest checkpoint that it may load; None: any.
        next_max_checkpoint_step: the same for the next attempt.
        config_number: its newest amendment; 0: its configuration is config.yaml.
        oom_kills: the kernel's count of processes killed for lack of memory when it started; None if unknown.
        train_events: number of events that its processes have written.
        newest_train_unix_s: time of the newest of them by rank 0's clock, like the next two.
        began_unix_s, first_step_unix_s: when training started, and when its first step ended; None: not yet.
        starting: ``groups_s``, ``load_s``, ``warm`` and ``restored_from`` of its ``train_started`` event.
        detect_s, decide_s: of its ``attempt_ended`` event; None: unknown.
        recovery: its ``recovered`` event; empty if it has none.
        stragglers: events that name a slow process.
        corruption: which of its processes compute wrong numbers; empty if none was found.
        corrupt_hosts: nodes that certainly have such a process, or one whose weights are not finite.
        noticed_hosts: nodes with a notice of the provider, by its kind.
        notice: the newest notice that the provider takes some of its nodes back; empty if there is none.
        leaving_hosts: nodes with such a notice.
        leaves_unix_s: when the last of them is taken back.
        hosts: nodes of the attempt; empty until it starts, or if the launcher doesn't report them.
        left_out_hosts: nodes that it had to avoid.
        blamed_hosts: those of them that failed first.
        rejected_hosts: those of them that failed a preflight after its end.
    """

    number: int
    handle: dict[str, Any]
    started_unix_s: float
    resumed_from_step: int | None = None
    log_freq: int = 1
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
    config_number: int = 0
    oom_kills: int | None = None
    train_events: int = 0
    newest_train_unix_s: float = 0.0
    began_unix_s: float | None = None
    first_step_unix_s: float | None = None
    starting: dict[str, Any] = field(default_factory=dict)
    detect_s: float | None = None
    decide_s: float | None = None
    recovery: dict[str, Any] = field(default_factory=dict)
    stragglers: list[Event] = field(default_factory=list)
    corruption: str = ""
    corrupt_hosts: list[str] = field(default_factory=list)
    notice: str = ""
    noticed_hosts: dict[str, list[str]] = field(default_factory=dict)
    leaving_hosts: list[str] = field(default_factory=list)
    leaves_unix_s: float = 0.0
    hosts: list[str] = field(default_factory=list)
    left_out_hosts: list[str] = field(default_factory=list)
    blamed_hosts: list[str] = field(default_factory=list)
    rejected_hosts: list[str] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether it ended other than by finishing, on request, or to evaluate its milestone."""
        return self.ended_unix_s is not None and self.cause not in _NO_FAILURES


@dataclass
class QueuedJob:
    """A job that waits in a scheduler's queue.

    Args:
        reason: the scheduler's reason; empty if it gives none.
        since_unix_s: when the job was first seen in the queue.
        expected_start_unix_s: the scheduler's expected start; None if it gives none.
        needs_person: the job waits until a person repairs a node.
    """

    reason: str
    since_unix_s: float
    expected_start_unix_s: float | None = None
    needs_person: bool = False


@dataclass
class ContractScores:
    """The scores of one evaluation, and its contract; empty if the journal doesn't name it."""

    contract: str
    scores: dict[str, dict[str, Any]]
    skipped: dict[str, str]


@dataclass
class EvaluationProgress:
    """Progress of an evaluation.

    Args:
        tasks: all tasks, in order.
        task: the running task, or the last one.
        done, total: answered requests of the task, and all of them; 0 while unknown.
        task_started_unix_s, updated_unix_s: when the task began, or this try's first count of it, and when ``done`` was
            counted.
        began_unix_s: when the task began.
        done_before: requests that an earlier try had answered.
        counted: times and numbers of answered requests, newest last. The first is this try's first answer.
        task_wall_s: time of each task that this try completed without a break; the first includes loading the model.
    """

    tasks: list[str]
    task: str = ""
    done: int = 0
    total: int = 0
    done_before: int | None = None
    task_started_unix_s: float = 0.0
    updated_unix_s: float = 0.0
    counted: list[tuple[float, int]] = field(default_factory=list)
    began_unix_s: float = 0.0
    task_wall_s: dict[str, float] = field(default_factory=dict)

    def count(self) -> None:
        """Keep the newest counts of answered requests, with their times."""
        if self.counted and self.done < self.counted[-1][1]:
            self.counted = []  # a partly answered batch is repeated
        if self.done > (self.done_before or 0):
            self.counted = [*self.counted[1 - _COUNTS_KEPT :], (self.updated_unix_s, self.done)]


@dataclass
class MilestoneState:
    """One milestone: ``due``, ``running``, ``evaluated`` or ``failed``.

    Args:
        scores, skipped: results under the run's first contract, or else under the newest one.
        contract: contract of the scores; empty if the journal doesn't name it.
        judgements: all evaluations of the milestone, by contract. The name is a key of `hlatctl status --json`.
        last_failure: why its last failed evaluation failed, even if a later one succeeded.
        progress: progress of the running evaluation.
        due_unix_s: when its checkpoint was complete and it began to wait.
        taken_unix_s: start of its export; None while it waits, and after its evaluation has ended.
        wall_s: time from the start of its export to its scores under the run's first contract; None if unknown.
        task_wall_s: time of each task in ``wall_s`` that ran without a break.
        is_partial: only tasks that a user chose are evaluated, not the run's whole suite.
    """

    milestone_tokens: int
    step: int
    status: str = "due"
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    contract: str = ""
    message: str = ""
    judgements: dict[str, ContractScores] = field(default_factory=dict)
    last_failure: str = ""
    progress: EvaluationProgress | None = None
    due_unix_s: float = 0.0
    taken_unix_s: float | None = None
    wall_s: float | None = None
    task_wall_s: dict[str, float] = field(default_factory=dict)
    is_partial: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for evaluation and no evaluator has taken it."""
        return (self.status == "due" or self.is_partial) and self.taken_unix_s is None and self.progress is None

    @property
    def is_done(self) -> bool:
        """Whether the run's suite is evaluated, not only tasks that a user chose."""
        return self.status == "evaluated" and not self.is_partial

    @property
    def others(self) -> list[ContractScores]:
        """Evaluations under other contracts."""
        return [scores for contract, scores in self.judgements.items() if contract != self.contract]


@dataclass
class AmendmentState:
    """A change of a run's configuration after the run was created.

    Args:
        number: number of the entry, from 1.
        changes: old and new value of each changed key.
        by, why: user and reason; ``why`` may be empty.
        at_step: step after which it begins; None: as soon as each key may change.
        newest_step: the run's newest step when it was made.
        applied_step: the last step without the change; None until it is in force. After a return to an earlier
            checkpoint, it is in force again from there.
    """

    number: int
    time_unix_s: float
    changes: dict[str, list[Any]]
    by: str = ""
    why: str = ""
    at_step: int | None = None
    newest_step: int = 0
    applied_step: int | None = None

    @property
    def late(self) -> str:
        """A note that the change began later than requested; else empty."""
        applied, asked = self.applied_step, self.at_step
        if applied is None or asked is None or not self.newest_step < asked < applied:
            return ""
        return f"later than asked for: step {asked:,} was over before the trainer had the order"

    @property
    def begins(self) -> str:
        """When it begins or began, in words."""
        if self.applied_step is not None:
            return f"from step {self.applied_step + 1:,}" + (f" ({self.late})" if self.late else "")
        return "pending" if self.at_step is None else f"pending, after step {self.at_step:,}"


@dataclass
class ProfileState:
    """A requested profile: ``asked``, ``done`` or ``failed``.

    Args:
        number: number of the entry, from 1.
        attempt: attempt that records it.
        steps, ranks, memory: what to record (``hlatctl.run.paths``).
        by: user who requested it.
        first_step, last_step, bytes: recorded steps, and the size of the files.
        message: reason of the failure.
    """

    number: int
    attempt: int
    steps: int
    ranks: list[int]
    memory: bool
    by: str = ""
    status: str = "asked"
    first_step: int = 0
    last_step: int = 0
    bytes: int = 0
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ForecastState:
    """What a ladder's rungs say of its target, written down before the target trains.

    Args:
        ladder: id of the ladder.
        objective: what is forecast, as in ``sweep.objective``.
        law: ``size`` or ``compute`` (``hlatctl.plan.scaling``).
        why: why it isn't the law of both size and tokens; empty if it is.
        loss: ``{"value", "low", "high"}``; the bounds are None without a degree of freedom.
        coverage: share of the distribution between the bounds.
        constants: those of the law, like ``loss``.
        rungs: ``{"trial", "parameters", "tokens", "flops", "loss", "fitted"}`` of each finished rung.
        target: its ``parameters``, ``tokens`` and ``flops``.
        held_out: ``{"trial", "value", "loss"}``: the largest rung's forecast by the others; empty if they are too few.
        curve: ``{"flops", "value", "low", "high"}`` from the smallest rung to the target.
        scores: by task, like ``loss``, with the score that it follows (``through``); or only ``why`` there is none.
        made_unix_s: time of the event.
    """

    ladder: str
    objective: str
    law: str
    why: str
    loss: dict[str, float | None]
    coverage: float
    constants: dict[str, dict[str, float | None]]
    rungs: list[dict[str, float]]
    target: dict[str, float]
    held_out: dict[str, float]
    curve: list[dict[str, float | None]]
    scores: dict[str, dict[str, Any]]
    made_unix_s: float

    @classmethod
    def of(cls, event: Event) -> ForecastState:
        """Return the forecast of an event; raises one of ``files.DAMAGED`` if it is damaged."""
        scores = {str(task): dict(score) for task, score in event["scores"].items()}
        for score in scores.values():
            score.update(_bounded(score) if "value" in score else {"why": str(score["why"])})
        return cls(
            ladder=str(event["ladder"]),
            objective=str(event["objective"]),
            law=str(event["law"]),
            why=str(event["why"]),
            loss=_bounded(event["loss"]),
            coverage=float(event["coverage"]),
            constants={str(name): _bounded(value) for name, value in event["constants"].items()},
            rungs=[_numbers(rung, _RUNG) for rung in event["rungs"]],
            target=_numbers(event["target"], _SIZE),
            held_out=_numbers(event["held_out"], _HELD_OUT) if event["held_out"] else {},
            curve=[{**_bounded(point), "flops": float(point["flops"])} for point in event["curve"]],
            scores=scores,
            made_unix_s=event["time_unix_s"],
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its event, without the time."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "made_unix_s"}


_SIZE = ("parameters", "tokens", "flops")
_RUNG = ("trial", *_SIZE, "loss", "fitted")
_HELD_OUT = ("trial", "value", "loss")


def _numbers(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    return {name: float(values[name]) for name in names}


def _bounded(values: dict[str, Any]) -> dict[str, float | None]:
    bounds = {name: None if values[name] is None else float(values[name]) for name in ("low", "high")}
    return {"value": float(values["value"]), **bounds}


@dataclass
class RunState:
    """The state of a run.

    Args:
        status: ``created``, ``running``, ``finished``, ``failed`` or ``stopped``.
        sweep: sweep that the run belongs to, or empty.
        forecast: the forecast of a ladder's target; None for every other run.
        argv: the command line that created the run.
        labels: name, tags and notes.
        archived: its checkpoints were removed, and it can't be resumed.
        amendments: changes of its configuration, in order.
        profiles: requested profiles, in order.
        steps: the steps that count, by step; without superseded ones.
        peak_flops_per_s: peak of one device; None if unknown.
        used: known values of ``USED`` at the newest step.
        checkpoints: steps of the checkpoints that were committed and neither rejected nor deleted.
        evaluates: the external model that this run only evaluates; empty for a training run.
        imported: source of imported scores; empty if they are not imported.
        contract: the first contract that an evaluation names; the run's scores are shown under it.
        spikes: start events of gradient spikes; ``length_steps`` is added when a spike ends.
        queued: jobs that wait in a scheduler's queue, by name.
        damages: those of the warnings that stand for damaged lines of the journal.
        evaluation_behind: an alarm reported that evaluation falls behind training, and milestones still wait.
        driver: token of the newest driver's lease.
        asked_driver: token of the driver that the newest stop request names; empty: no request.
        stop_by: who made the newest stop request: a user, ``interrupt``, or ``budget``.
        worked_unix_s: time of the newest event that no person wrote.
        has_nodes: it has asked for the nodes of training and not released them.
        held_s: time for which it has held them, by the attempt's newest amendment (``AttemptState.config_number``): the
            number of nodes can change with it.
        trust: state of each checkpoint: ``committed``, ``verified`` (read again) or ``survived`` (healthy steps later).
        trusted_step: the newest step after which all processes computed the same; None: nothing was checked.
    """

    run_id: str = ""
    status: str = "created"
    simulated: bool = False
    argv: list[str] = field(default_factory=list)
    evaluates: str = ""
    imported: dict[str, Any] = field(default_factory=dict)
    sweep: str = ""
    forecast: ForecastState | None = None
    contract: str = ""
    created_unix_s: float = 0.0
    last_event_unix_s: float = 0.0
    worked_unix_s: float = 0.0
    stages: dict[str, StageState] = field(default_factory=dict)
    attempts: list[AttemptState] = field(default_factory=list)
    labels: LabelState = field(default_factory=LabelState)
    archived: bool = False
    amendments: list[AmendmentState] = field(default_factory=list)
    profiles: list[ProfileState] = field(default_factory=list)
    queued: dict[str, QueuedJob] = field(default_factory=dict)
    steps: StepSeries = field(default_factory=StepSeries)
    peak_flops_per_s: float | None = None
    used: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    trust: dict[int, str] = field(default_factory=dict)
    trusted_step: int | None = None
    milestones: dict[int, MilestoneState] = field(default_factory=dict)
    spikes: list[Event] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    damages: list[str] = field(default_factory=list)
    evaluation_behind: bool = False
    train_stopped: str = ""
    stop_requested: bool = False
    driver: str = ""
    asked_driver: str = ""
    stop_by: str = ""
    has_nodes: bool = False
    held_s: dict[int, float] = field(default_factory=dict)
    message: str = ""

    @property
    def holds_nodes(self) -> bool:
        """Whether it holds the nodes of training now, so that their time costs."""
        return self.has_nodes and not any(job in self.queued for job in _ON_NODES)

    def hold(self, seconds: float) -> None:
        """Count time for which it held the nodes of training."""
        number = self.attempts[-1].config_number if self.attempts else 0
        self.held_s[number] = self.held_s.get(number, 0.0) + seconds

    @property
    def last_step(self) -> Event | None:
        """The newest step that counts."""
        return next(self.steps.last(1), None)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.steps.newest

    @property
    def tokens(self) -> int:
        """Tokens that the optimizer has consumed."""
        return self.steps.newest_tokens

    @property
    def attempt(self) -> AttemptState | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def restarts(self) -> int:
        """Number of attempts that the driver began after a failure. Restarts caused by a person are not counted."""
        return sum(attempt.has_failed and attempt.decision != "stop" for attempt in self.attempts[:-1])

    @property
    def open_profile(self) -> ProfileState | None:
        """The profile that is asked for and not made yet. Only the newest one can be: requests exclude each other."""
        return self.profiles[-1] if self.profiles and self.profiles[-1].status == "asked" else None

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
