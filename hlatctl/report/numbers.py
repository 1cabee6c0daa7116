"""The numbers of a run's report, for its figures, page and summary; pure.

They include throughput by number of nodes, measured and planned, statistics of gradient spikes by HLAT's rule, and the
values that amendments changed over the course of the run. Spikes here are not alarms.
"""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from conf.load import flatten
from conf.schema import Config
from conf.sizes import mfu
from conf.validate import validate
from hlatctl.plan.step_time import peak_flops_per_s, step_time_s
from hlatctl.run.errors import HlatctlError
from hlatctl.run.state import AmendmentState, ContractScores, RunState
from hlatctl.units import counted

_IN_FORCE_NODES, _SPARE, _PER_NODE = "cluster.nodes", "cluster.spare_nodes", "cluster.processes_per_node"


def value_of(key: str, number: int, state: RunState, config: Config) -> Any:
    """Return the value of a key after an amendment (0: as created); ``config`` has all amendments."""
    later = (a.changes[key][0] for a in state.amendments if a.number > number and key in a.changes)
    return next(later, flatten(config)[key])


def process_hours(state: RunState, config: Config) -> float:
    """Return the hours of all training processes, idle or not, while the run held its nodes."""
    return _held_hours(state, config, lambda value: value(_IN_FORCE_NODES) * value(_PER_NODE))


def node_hours(state: RunState, config: Config, now_unix_s: float | None = None) -> float:
    """Return the node-hours that a run has used over all attempts, with kept and spare nodes; the only count of them.

    Nodes count from the preflight or an attempt's start to the end of training or of the run, without the time in a
    queue and the time before a driver takes over from a dead one. Evaluations on other nodes are not included.

    Args:
        now_unix_s: count up to this time; None: up to the newest event that no person wrote.
    """
    since_s = 0.0 if now_unix_s is None or not state.holds_nodes else now_unix_s - state.worked_unix_s
    return _held_hours(state, config, lambda value: value(_IN_FORCE_NODES) + value(_SPARE), max(0.0, since_s))


def cost_usd(state: RunState, config: Config, now_unix_s: float | None = None) -> float | None:
    """Return the price of a run's node-hours; None without ``cluster.price_usd_per_node_hour``."""
    price = config.cluster.price_usd_per_node_hour
    return None if price is None else price * node_hours(state, config, now_unix_s)


def size_since_step(state: RunState) -> int:
    """Return the last step trained by a different number of processes than the newest; 0 if none."""
    changed = (a for a in state.amendments if {_IN_FORCE_NODES, _PER_NODE} & set(a.changes))
    return max((a.applied_step for a in changed if a.applied_step is not None), default=0)


def _held_hours(
    state: RunState, config: Config, size: Callable[[Callable[[str], int]], int], since_s: float = 0.0
) -> float:
    newest = state.attempts[-1].config_number if state.attempts else 0
    held_s = state.held_s | ({newest: state.held_s.get(newest, 0.0) + since_s} if since_s else {})
    sizes = {number: size(partial(value_of, number=number, state=state, config=config)) for number in held_s}
    return math.fsum(seconds * sizes[number] for number, seconds in held_s.items()) / 3600


#: Steps over which the newest loss is averaged, because the loss of one batch is noisy.
LOSS_WINDOW_STEPS = 20
#: More values are sorted by numpy, which a short run doesn't need.
_MANY = 100_000


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task at one milestone. Scores under different contracts can't be compared.

    ``chance`` is the score of guessing; None if it is unknown.
    """

    task: str
    metric: str
    value: float | None
    stderr: float | None
    n: int | None
    contract: str
    chance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """One milestone and its scores under one contract.

    ``is_own`` is false if the contract differs from that of the run's first evaluation.
    """

    tokens: int
    step: int
    status: str
    scores: list[Score]
    skipped: dict[str, str]
    message: str
    contract: str
    is_own: bool

    def score(self, task: str) -> Score | None:
        """Return the score of a task, if there is one."""
        return next((score for score in self.scores if score.task == task), None)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One training attempt, which started after ``tokens``. The next one redid ``lost_steps``."""

    number: int
    started_unix_s: float
    wall_s: float | None
    from_step: int
    tokens: int
    last_step: int
    lost_steps: int
    cause: str
    evidence: str
    decision: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the flow."""

    name: str
    status: str
    wall_s: float
    message: str


@dataclass(frozen=True, kw_only=True)
class Amendment:
    """A change of the run's configuration.

    Args:
        changes: old and new value by key.
        begins: start of the amendment, in words.
        after_step, tokens: the last step without the change, and its tokens; None: not in force yet.
    """

    number: int
    time_unix_s: float
    by: str
    why: str
    changes: dict[str, list[Any]]
    begins: str
    after_step: int | None
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A run in numbers.

    Args:
        first_loss, last_loss: means over the first and the last ``LOSS_WINDOW_STEPS`` steps, nats per token; over
            the two halves of a shorter run.
        tokens_per_s: median over the steps.
        peak_memory_bytes: peak of rank 0's newest process; None if unknown.
        data_wait_fraction: share of the steps' time spent waiting for data.
        evaluates: the external model that the run only evaluates; empty for a training run.
        imported: source of imported scores; empty if they are not imported.
        sweep: sweep that the run belongs to; empty if none.
        forked_from: run and step that this run was forked from; empty if it is no fork.
    """

    run_id: str
    experiment_name: str
    status: str
    simulated: bool
    created_unix_s: float
    step: int
    total_steps: int
    tokens: int
    total_tokens: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    mfu_fraction: float | None
    peak_memory_bytes: int | None
    data_wait_fraction: float | None
    lost_steps: int
    gradient_spikes: int
    milestones: list[Milestone]
    attempts: list[Attempt]
    amendments: list[Amendment]
    stages: list[Stage]
    training_stages: dict[str, int]
    warnings: list[str]
    message: str
    evaluates: str
    imported: str
    sweep: str
    name: str
    tags: dict[str, str]
    notes: list[str]
    forked_from: str


def numbers(state: RunState, config: Config) -> Numbers:
    """Return the numbers of a folded journal."""
    losses, step_s, waits_s = (column(state, name) for name in ("loss", "step_s", "data_wait_s"))
    tokens_per_s = median(column(state, "tokens_per_s"))
    window = max(1, min(LOSS_WINDOW_STEPS, len(losses) // 2))  # so that the two never overlap
    milestones, attempts = _milestones(state), attempts_of(state, config)
    return Numbers(
        run_id=state.run_id,
        experiment_name=config.experiment_name,
        status=_status(state, config),
        simulated=state.simulated,
        created_unix_s=state.created_unix_s,
        step=state.step,
        total_steps=config.total_steps,
        tokens=state.tokens,
        total_tokens=config.total_tokens,
        first_loss=mean(losses[:window]),
        last_loss=mean(losses[-window:]),
        validation_loss=_newest_validation(milestones),
        tokens_per_s=tokens_per_s,
        mfu_fraction=_mfu(state, config),
        peak_memory_bytes=state.used.get("peak_memory_bytes"),
        data_wait_fraction=_ratio(sum(waits_s), sum(step_s)),
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        gradient_spikes=len(state.spikes),
        milestones=milestones,
        attempts=attempts,
        amendments=[amended(amendment, config) for amendment in state.amendments],
        stages=[
            Stage(name=stage.name, status=stage.status, wall_s=float(stage.wall_s), message=stage.message)
            for stage in state.stages.values()
        ],
        training_stages={stage.name: stage.after_tokens for stage in config.stages},
        warnings=state.warnings,
        message=state.message,
        evaluates=state.evaluates,
        imported=origin_text(state.imported),
        sweep=state.sweep,
        name=state.labels.name,
        tags=state.labels.tags,
        notes=[note.text for note in state.labels.notes],
        forked_from="" if config.fork.run is None else f"{config.fork.run} at step {config.fork.step:,}",
    )


def column(state: RunState, name: str) -> Sequence[float]:
    """Return one field of the steps that count, in order; NaN where it is missing or not finite."""
    (values,) = state.steps.columns(name)
    # A finite sum has no infinite part, and is quick.
    if not math.isfinite(sum(values)) and (math.inf in values or -math.inf in values):
        return [value if math.isfinite(value) else math.nan for value in values]
    return values


def finite_or_nan(value: Any) -> float:
    """Return a journal's number as a finite float; NaN for the texts ``nan`` and ``inf``, and for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def thin(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` values: means of equal groups of neighbours."""
    if len(values) <= most:
        return list(values)
    edges = [len(values) * part // most for part in range(most + 1)]
    return [_mean_or_nan(values[start:end]) for start, end in itertools.pairwise(edges)]


def envelope(values: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Return the least and the largest values of the groups that :func:`thin` makes. NaN if a group has none."""
    edges = [len(values) * part // most for part in range(most + 1)]
    groups = (_known(values[start:end]) for start, end in itertools.pairwise(edges))
    ends = [(min(group), max(group)) if group else (math.nan, math.nan) for group in groups]
    return [low for low, _ in ends], [high for _, high in ends]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving mean over up to ``window`` values."""
    before, after = window // 2, window - window // 2
    return [_mean_or_nan(values[max(0, at - before) : at + after]) for at in range(len(values))]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean without NaN values; None if there is none."""
    finite = _known(values)
    return math.fsum(finite) / len(finite) if finite else None


def _known(values: Sequence[float]) -> Sequence[float]:
    """Return the values that aren't NaN. A run has millions, and one NaN makes their sum NaN."""
    return array("d", (value for value in values if not math.isnan(value))) if math.isnan(sum(values)) else values


def median(values: Sequence[float]) -> float | None:
    """Return the median without NaN values; None if there is none."""
    finite = _known(values)
    if len(finite) < _MANY:
        return statistics.median(finite) if finite else None
    import numpy as np

    return float(np.median(finite))


def _status(state: RunState, config: Config) -> str:
    # The flow's last stage writes the page, before the journal has "run_finished".
    if state.evaluates and state.status == "running":
        return "evaluated"
    done = state.step >= config.total_steps and state.status == "running"
    return "trained" if done else state.status


def _milestones(state: RunState) -> list[Milestone]:
    return [
        Milestone(
            tokens=milestone.milestone_tokens,
            step=milestone.step,
            status=milestone.status,
            skipped=dict(shown.skipped),
            message=milestone.message,
            contract=shown.contract,
            is_own=not shown.scores or shown.contract == state.contract,
            scores=[_score(task, score, shown.contract) for task, score in sorted(shown.scores.items())],
        )
        for _, milestone in sorted(state.milestones.items())
        for shown in (ContractScores(milestone.contract, milestone.scores, milestone.skipped), *milestone.others)
    ]


def _score(task: str, score: dict[str, Any], contract: str) -> Score:
    count = score.get("n")
    return Score(
        task=task,
        metric=str(score.get("metric", "")),
        value=_number(score.get("value")),
        stderr=_number(score.get("stderr")),
        n=count if isinstance(count, int) else None,
        contract=str(score.get("contract") or contract),
        chance=_number(score.get("chance")),
    )


def comparable(milestones: Sequence[Milestone], task: str) -> list[tuple[Milestone, Score]]:
    """Return a task's scores that have the contract of its first score."""
    scored = [(milestone, score) for milestone in milestones if (score := milestone.score(task))]
    return [(milestone, score) for milestone, score in scored if score.contract == scored[0][1].contract]


def _newest_validation(milestones: list[Milestone]) -> float | None:
    scored = comparable(milestones, "validation_loss")
    return scored[-1][1].value if scored else None


def attempts_of(state: RunState, config: Config) -> list[Attempt]:
    """Return a run's attempts; the cost doesn't depend on the number of steps."""
    rows = []
    for attempt, after in itertools.zip_longest(state.attempts, state.attempts[1:]):
        begun = attempt.resumed_from_step or 0
        resumed = after.resumed_from_step if after else None
        ended = attempt.ended_unix_s
        rows.append(
            Attempt(
                number=attempt.number,
                started_unix_s=attempt.started_unix_s,
                wall_s=ended - attempt.started_unix_s if ended is not None else None,
                from_step=begun,
                tokens=config.tokens_at(begun),
                last_step=attempt.last_step or begun,
                lost_steps=max(0, attempt.last_step - resumed) if resumed is not None else 0,
                cause=attempt.cause,
                evidence=attempt.evidence,
                decision=attempt.decision,
                why=attempt.why,
            )
        )
    return rows


def amended(amendment: AmendmentState, config: Config | None = None) -> Amendment:
    """Return an amendment as the report shows it; its tokens only with the run's configuration."""
    after = amendment.applied_step
    return Amendment(
        number=amendment.number,
        time_unix_s=amendment.time_unix_s,
        by=amendment.by,
        why=amendment.why,
        changes=amendment.changes,
        begins=amendment.begins,
        after_step=after,
        tokens=None if after is None or config is None else config.tokens_at(after),
    )


def _mfu(state: RunState, config: Config) -> float | None:
    """Return the model FLOPs utilisation; None without the device's peak.

    Only steps of the newest number of processes count.
    """
    since = size_since_step(state)
    steps, rates = state.steps.columns("step", "tokens_per_s")
    newest = rates if not since else [rate for step, rate in zip(steps, rates, strict=True) if step > since]
    tokens_per_s = median(newest)
    if tokens_per_s is None:
        return None
    planned = peak_flops_per_s(config)  # sum over all devices; a dry run measures none
    return mfu(config, tokens_per_s, state.peak_flops_per_s or (planned / config.world_size if planned else None))


def _number(value: Any) -> float | None:
    number = finite_or_nan(value)
    return None if math.isnan(number) else number


def _mean_or_nan(values: Sequence[float]) -> float:
    average = mean(values)
    return math.nan if average is None else average


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and math.isfinite(part) else None


_SCALING_NODES = "cluster.nodes"
#: Numbers of nodes that the plan covers, as multiples of the run's.
_MULTIPLES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)


@dataclass(frozen=True)
class Scaling:
    """Tokens per second by nodes, ``planned`` (none without ``cluster.hardware``) and ``measured`` (median)."""

    planned: dict[int, float]
    measured: dict[int, float]

    def efficiency(self, nodes: int) -> float | None:
        """Return the throughput per node as a share of the plan's on the fewest nodes; None if one is unknown."""
        rate = self.measured.get(nodes, self.planned.get(nodes))
        if rate is None or not self.planned:
            return None
        fewest = min(self.planned)
        return rate / nodes / (self.planned[fewest] / fewest)


def scaling(state: RunState, config: Config) -> Scaling:
    """Return the scaling of a run."""
    measured = _measured(state, config)
    wanted = {round(config.cluster.nodes * multiple) for multiple in _MULTIPLES} | set(measured)
    planned = ((nodes, _planned(config, nodes)) for nodes in sorted(wanted) if nodes > 0)
    return Scaling({nodes: rate for nodes, rate in planned if rate is not None}, measured)


def _planned(config: Config, nodes: int) -> float | None:
    other = replace(config, cluster=replace(config.cluster, nodes=nodes))
    try:
        validate(other, to_start=False)
        step_s = step_time_s(other)
    except (HlatctlError, ZeroDivisionError):
        return None
    return other.tokens_per_step / step_s if step_s else None


def _measured(state: RunState, config: Config) -> dict[int, float]:
    """Return the median throughput on each number of nodes. Only amendments change it, so most runs have one."""
    nodes_of = {
        attempt.number: int(value_of(_SCALING_NODES, attempt.config_number, state, config))
        for attempt in state.attempts
    }
    attempts, rates = state.steps.columns("attempt", "tokens_per_s")
    if len(set(nodes_of.values())) <= 1:
        by_nodes: dict[int, Sequence[float]] = {next(iter(nodes_of.values()), config.cluster.nodes): rates}
    else:
        sizes: defaultdict[int, array[float]] = defaultdict(lambda: array("d"))
        for number, rate in zip(attempts, rates, strict=True):
            sizes[nodes_of.get(number, config.cluster.nodes)].append(rate)
        by_nodes = {**sizes}
    medians = {nodes: median(values) for nodes, values in sorted(by_nodes.items())}
    return {nodes: rate for nodes, rate in medians.items() if rate is not None}


#: The rule in words (arXiv 2404.10630, section 4.3); ``trainer.step.monitor`` has its numbers.
RULE = "the norm is more than 0.1 above the mean of the last 20 steps (HLAT's rule)"


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """The spikes of a run.

    Args:
        lengths_steps: lengths of the spikes that ended, ascending.
    """

    count: int
    steps: int
    lengths_steps: list[int]

    @classmethod
    def of(cls, state: RunState) -> Spikes:
        """Return the spikes of a run's steps that count."""
        lengths = sorted(int(spike["length_steps"]) for spike in state.spikes if "length_steps" in spike)
        return cls(count=len(state.spikes), steps=state.step, lengths_steps=lengths)

    @property
    def one_step_fraction(self) -> float | None:
        """The share of spikes that last one step; HLAT reports 86 %."""
        return self.lengths_steps.count(1) / len(self.lengths_steps) if self.lengths_steps else None

    def facts(self) -> list[tuple[str, str]]:
        """Return the statistics as name and text."""
        known = [("spikes", f"{self.count:,}"), ("rule", RULE)]
        if self.steps:
            known.append(("spikes per 1,000 steps", f"{1000 * self.count / self.steps:.1f}"))
        if self.one_step_fraction is not None:
            known += [
                ("last one step", f"{100 * self.one_step_fraction:.0f} % (HLAT: 86 %)"),
                ("median length", f"{statistics.median(self.lengths_steps):g} steps"),
                ("greatest length", f"{self.lengths_steps[-1]:,} steps"),
            ]
        return known

    def in_words(self) -> str:
        """Return the main statistics in one sentence."""
        share = self.one_step_fraction
        if share is None:
            return f"{counted(self.count, 'spike')}."
        return f"{counted(self.count, 'spike')}; {100 * share:.0f} % last one step (HLAT: 86 %)."


def origin_text(imported: Mapping[str, Any]) -> str:
    """Return file, evaluator, model and day of imported scores, as far as known; empty for an empty mapping."""
    if not imported:
        return ""
    evaluator = f"{imported.get('form')} {imported.get('version') or ''}".strip()
    known = [evaluator, *(str(imported.get(key) or "") for key in ("model", "date"))]
    file = f"{imported.get('file')} (sha256 {str(imported.get('sha256'))[:12]})"
    return ", ".join([file, *filter(None, known)])
