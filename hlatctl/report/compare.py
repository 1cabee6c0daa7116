"""Compare runs' scores with each other and with published ones, and rank the cells of each row.

Only scores that were measured equally are ranked. The leftmost run of a row sets the contract. Scores under another
contract, under an unknown contract, or of a simulated run are shown but not ranked. Published scores are ranked if the
leftmost run used the same shots, all items, and the published number of items (if there is one). Imported scores are
ranked if evaluator, version of the task, shots and items are known and equal to those of the leftmost run.

Two values tie if their difference is within ``Z_95`` standard errors of the difference: a two-sided z-test at 95 % for
independent samples. Runs that answer the same items have correlated errors, so the test reports too many ties for them
rather than too few. An unknown standard error counts as 0: every reported tie is one, but some ties are missed. A value
is best only if it ties with no other, and if at least one standard error of each pair is known.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any

from hlatctl.report import baselines
from hlatctl.report.baselines import Baselines, Layout, Model, RowSpec, RowTitle
from hlatctl.report.contracts import Conditions, Known, ScoreContracts, agree, first_difference, of_imported, of_mean
from hlatctl.report.numbers import finite_or_nan, origin_text
from hlatctl.run import contract as contracts
from hlatctl.run.contract import Record
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import HELD_OUT, LOWER_IS_BETTER, find_milestone, skipped_in_words
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from hlatctl.units import count

#: Standard errors of a two-sided 95 % interval.
Z_95 = NormalDist().inv_cdf(0.975)
#: Standings of a cell in its row.
BEST, TIE = "best", "tie"
#: Remarks on a cell; only cells with none, ``PUBLISHED`` or ``IMPORTED`` are ranked.
PUBLISHED, OTHER_CONTRACT, NO_CONTRACT, SIMULATED = "published", "another_contract", "contract_unknown", "simulated"
PUBLISHED_OTHERWISE = "published_otherwise"
IMPORTED, IMPORTED_UNKNOWN = "imported", "imported_contract_unknown"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value in its row's unit.

    Args:
        stderr: standard error; means over tasks assume independent tasks.
        conditions: how the value was measured, as far as known.
        contract: contract of the score; several are joined by ``+``.
        standing: ``best``, ``tie`` (statistically equal to the best) or empty.
        remark: why the value is not fully comparable; empty if it is.
        chance: the score of guessing; None if it is unknown.
    """

    value: float
    stderr: float | None
    n: int | None
    conditions: Conditions
    contract: str | None
    standing: str = ""
    remark: str = ""
    chance: float | None = None


def ranked(ideal: str | float, cells: list[Cell | None]) -> list[Cell | None]:
    """Return the cells with their standings, if at least two can be ranked."""
    candidates = [cell for cell in cells if cell and _is_ranked(cell)]
    if len(candidates) < 2 or ideal == baselines.UNKNOWN:
        return cells
    top = min(candidates, key=lambda cell: _badness(cell, ideal))
    others = [cell for cell in candidates if cell is not top]
    tied = [cell for cell in others if _ties(cell, top, ideal)]
    alone = not tied and all(cell.stderr is not None or top.stderr is not None for cell in others)

    def standing(cell: Cell) -> str:
        if cell is top:
            return BEST if alone else TIE if tied else ""
        return TIE if any(cell is other for other in tied) else ""

    return [replace(cell, standing=standing(cell)) if cell and _is_ranked(cell) else cell for cell in cells]


def _is_ranked(cell: Cell) -> bool:
    return cell.remark in ("", PUBLISHED, IMPORTED)


def marked(cells: list[Cell | None]) -> list[Cell | None]:
    """Return the cells, with remarks on those that can't be compared with the leftmost run of a known contract."""
    reference = next((cell for cell in cells if cell and not cell.remark and cell.contract), None)
    # A published number of items is the benchmark's size, so it also holds for values published without one.
    sizes = {cell.n for cell in cells if cell and cell.remark == PUBLISHED and cell.n is not None}

    def mark(cell: Cell | None) -> Cell | None:
        if cell is None or cell.remark not in ("", PUBLISHED, IMPORTED):
            return cell
        if cell.remark == IMPORTED:
            alike = reference is not None and _as_imported(reference, cell)
            return cell if alike else replace(cell, remark=IMPORTED_UNKNOWN)
        if cell.remark == PUBLISHED:
            alike = reference is None or _as_published(reference, cell, sizes)
            return cell if alike else replace(cell, remark=PUBLISHED_OTHERWISE)
        if reference and cell.contract == reference.contract:
            return cell
        return replace(cell, remark=OTHER_CONTRACT if cell.contract else NO_CONTRACT)

    return [mark(cell) for cell in cells]


def _as_published(measured: Cell, published: Cell, sizes: set[int]) -> bool:
    own = measured.conditions
    same_items = not sizes or measured.n in sizes
    return own.whole is True and own.shots == published.conditions.shots and same_items


def _as_imported(measured: Cell, imported: Cell) -> bool:
    return measured.n == imported.n is not None and agree(imported.conditions, measured.conditions)


def _ties(cell: Cell, top: Cell, ideal: str | float) -> bool:
    difference = _badness(cell, ideal) - _badness(top, ideal)
    return difference <= Z_95 * math.hypot(cell.stderr or 0.0, top.stderr or 0.0)


def _badness(cell: Cell, ideal: str | float) -> float:
    if isinstance(ideal, str):
        return -cell.value if ideal == baselines.HIGHEST else cell.value
    return abs(cell.value - ideal)


RUN, BASELINE = "run", "baseline"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One score of a run, as the harness reports it."""

    metric: str
    value: float
    stderr: float | None
    n: int | None
    known: Known
    chance: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """The scores of one milestone of a run, by name.

    Args:
        skipped: reason for each task that could not run.
        imported: source of imported scores; empty if they are not imported.
        name: display name of the run; empty: its id.
    """

    run_id: str
    tokens: int
    step: int
    simulated: bool
    scores: dict[str, Measured]
    skipped: Mapping[str, str] = field(default_factory=dict)
    imported: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def contracts(self) -> list[str]:
        """Return the known contracts of the tasks' scores, or of the held-out text if there are no tasks."""
        return sorted({score.known.key for score in self._tasks or self.scores.values() if score.known.key})

    @property
    def limits(self) -> list[float | None]:
        """Return the different known limits of items per task; None: all items.

        The limit of an import that names none is known only if all items were counted.
        """
        known = [score.known for score in self._tasks]
        named = [each.conditions.limit for each in known if each.fields or _says_items(each.conditions)]
        return list(dict.fromkeys(named))

    @property
    def data(self) -> list[str]:
        """Return a hash of the tasks' datasets. Empty if one is unknown."""
        hashes = [score.known.conditions.data for score in self._tasks if score.known.key]
        return [contracts.digest(sorted({one for one in hashes if one}))] if hashes and all(hashes) else []

    @property
    def _tasks(self) -> list[Measured]:
        return [score for name, score in self.scores.items() if not name.startswith(HELD_OUT)]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One run, or one published model with its ``source``. Empty lists mean unknown.

    ``imported`` is the source of imported scores; empty if the run has its own. ``title`` is a run's display name.
    """

    name: str
    title: str
    kind: str
    tokens: int
    step: int | None = None
    contracts: list[str] = field(default_factory=list)
    limits: list[float | None] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    simulated: bool = False
    imported: str = ""
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreRow(RowTitle):
    """One row; None if the column has no value."""

    cells: list[Cell | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The table; ``notes`` are the differences of contracts and the notes of the published scores."""

    columns: list[Column]
    rows: list[ScoreRow]
    notes: list[str]


def run_scores(
    run_id: str,
    milestone: MilestoneState,
    *,
    simulated: bool,
    contract: str | None,
    recorded: Record | None = None,
    imported: Mapping[str, Any] | None = None,
    name: str = "",
) -> RunScores:
    """Return a milestone's scores, without damaged ones and those that are not numbers.

    Args:
        contract: contract of scores that don't name one.
        recorded: the contracts that the run has accepted. Of these, only the fields that must be equal between runs are
            compared; any other contract is compared by its hash.
        imported: source of imported scores; None or empty if the run has its own.
        name: display name of the run.
    """
    scores, known = {}, ScoreContracts(recorded or Record())
    for task, record in milestone.scores.items():
        value = finite_or_nan(record.get("value")) if isinstance(record, dict) else math.nan
        if not math.isnan(value):
            own = known.of(str(task), str(record.get("contract") or contract or ""))
            if imported:
                own = replace(own, conditions=of_imported(record, imported))
            scores[str(task)] = _measured(record, value, own)
    return RunScores(
        run_id=run_id,
        tokens=milestone.milestone_tokens,
        step=milestone.step,
        simulated=simulated,
        scores=scores,
        skipped=milestone.skipped,
        imported=imported or {},
        name=name,
    )


def compare(runs: Sequence[RunScores], published: Baselines | None = None) -> Comparison:
    """Return the table of runs, followed by published models."""
    models = published.models if published else ()
    named = Counter(run.name for run in runs)
    columns = [
        Column(
            name=run.run_id,
            title=run.name + (f" ({run.run_id})" if named[run.name] > 1 else "") if run.name else run.run_id,
            kind=RUN,
            tokens=run.tokens,
            step=run.step,
            contracts=run.contracts,
            limits=run.limits,
            data=run.data,
            simulated=run.simulated,
            imported=origin_text(run.imported),
        )
        for run in runs
    ]
    if published:
        columns += [
            Column(name=model.name, title=model.name, kind=BASELINE, tokens=model.tokens, source=published.source)
            for model in models
        ]
    layout = baselines.layout()
    rows = _shown([_row(spec, runs, models) for spec in (*layout.rows, *_others(layout, runs))])
    origins = [f"{column.name}: imported from {column.imported}" for column in columns if column.imported]
    skipped = [f"{run.run_id}: {line}" for run in runs for line in skipped_in_words(run.skipped)]
    notes = [
        *origins,
        *skipped,
        *_own_definitions(runs),
        *_differences(rows, runs),
        *(published.notes if published else ()),
    ]
    return Comparison(columns=columns, rows=rows, notes=notes)


def _measured(record: Mapping[str, Any], value: float, known: Known) -> Measured:
    stderr, count = finite_or_nan(record.get("stderr")), record.get("n")
    return Measured(
        metric=str(record.get("metric", "")),
        value=value,
        stderr=None if math.isnan(stderr) else stderr,
        n=count if isinstance(count, int) else None,
        known=known,
        chance=None if math.isnan(chance := finite_or_nan(record.get("chance"))) else chance,
    )


def _says_items(conditions: Conditions) -> bool:
    return conditions.limit is not None or conditions.whole is True


def _own_definitions(runs: Sequence[RunScores]) -> list[str]:
    """Return a note on the scores of each run with user-defined tasks (``eval.include_path``)."""
    notes = []
    for run in runs:
        names = [name for name, score in run.scores.items() if _is_own(score.known.fields or {})]
        notes += [f"{run.run_id}: own definition of {', '.join(names)}"] if names else []
    return notes


def _is_own(contract: Mapping[str, Any]) -> bool:
    return any(fields.get("own") for fields in (contract, *contract.get("tasks", {}).values()))


def _differences(rows: Sequence[ScoreRow], runs: Sequence[RunScores]) -> list[str]:
    """Return notes on how runs' contracts differ from those of the leftmost runs, one per first differing field."""
    asked = {score.known.key: score.known.fields for run in runs for score in run.scores.values() if score.known.fields}
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for row in rows:
        own = next((cell for cell in row.cells if cell and cell.contract and not cell.remark), None)
        for run, cell in zip(runs, row.cells, strict=False):
            if not (own and cell and cell.remark == OTHER_CONTRACT):
                continue
            before, now = asked.get(own.contract), asked.get(cell.contract)
            difference = first_difference(before, now) if before and now else None
            if difference:
                name, ours, theirs = difference
                found.setdefault((run.run_id, name), []).append((row.part or row.group, ours, theirs))
    return [_difference(run_id, name, places) for (run_id, name), places in found.items()]


def _difference(run_id: str, name: str, places: list[tuple[str, str, str]]) -> str:
    row, ours, theirs = places[0]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{run_id} has another contract for {row}{more}: {name} is {theirs}, elsewhere {ours}"


def _names(task: str, metric: str) -> tuple[str, str]:
    """Return the possible names of a task's score: the task, or with the metric, such as ``humaneval_pass_at_10``."""
    return task, f"{task}_{metric.replace('@', '_at_')}"


def _find(run: RunScores, task: str, metric: str) -> Measured | None:
    scores = (run.scores.get(name) for name in _names(task, metric))
    return next((score for score in scores if score and score.metric == metric), None)


def _all(run: RunScores, wanted: Mapping[str, str]) -> list[Measured] | None:
    scores = [score for task, metric in wanted.items() if (score := _find(run, task, metric))]
    return scores if len(scores) == len(wanted) else None


def _others(layout: Layout, runs: Sequence[RunScores]) -> list[RowSpec]:
    wanted = {pair for row in layout.rows for scores in row.of for pair in scores.items()}
    taken = {(name, metric) for task, metric in wanted for name in _names(task, metric)}
    pairs = {(name, score.metric) for run in runs for name, score in run.scores.items()} - taken
    simulated = {name for run in runs if run.simulated for name in run.scores}  # ``mmlu_simulated`` is no part of MMLU
    left_out = re.compile("|".join(map(fnmatch.translate, layout.left_out)))
    kept = [pair for pair in pairs if pair[0] in simulated or not left_out.fullmatch(pair[0])]
    return [
        RowSpec(
            id=name,
            section=layout.others,
            group=name,
            part="",
            shots=None,
            metric=metric,
            of=({name: metric},),
            unit=baselines.PERCENT if metric in layout.fractions else baselines.PLAIN,
            best=baselines.LOWEST if metric in LOWER_IS_BETTER else layout.fractions.get(metric, baselines.UNKNOWN),
        )
        for name, metric in sorted(kept, key=lambda pair: (pair[1] not in layout.fractions, pair))
    ]


def _row(spec: RowSpec, runs: Sequence[RunScores], models: Sequence[Model]) -> ScoreRow:
    cells = [*(_run_cell(spec, run) for run in runs), *(_model_cell(spec, model) for model in models)]
    cells = ranked(spec.best, marked(cells))
    return ScoreRow(**{each.name: getattr(spec, each.name) for each in fields(RowTitle)}, cells=cells)


def _run_cell(spec: RowSpec, run: RunScores) -> Cell | None:
    scores = next(filter(None, (_all(run, wanted) for wanted in spec.of)), None)
    if scores is None:
        return None
    scale = 100.0 if spec.unit == baselines.PERCENT else 1.0
    errors = [score.stderr for score in scores if score.stderr is not None]
    counts = [score.n for score in scores if score.n is not None]
    keys = [score.known.key for score in scores if score.known.key]
    chances = [score.chance for score in scores if score.chance is not None]
    whole = len(scores)
    return Cell(
        value=scale * math.fsum(score.value for score in scores) / whole,
        stderr=scale * math.hypot(*errors) / whole if len(errors) == whole else None,
        n=sum(counts) if len(counts) == whole else None,
        conditions=of_mean([score.known.conditions for score in scores]),
        contract="+".join(dict.fromkeys(keys)) if len(keys) == whole else None,
        remark=SIMULATED if run.simulated else IMPORTED if run.imported else "",
        chance=scale * math.fsum(chances) / whole if len(chances) == whole else None,
    )


def _model_cell(spec: RowSpec, model: Model) -> Cell | None:
    if spec.id not in model.figures:
        return None
    value, stderr = model.figures[spec.id]
    return Cell(
        value=value,
        stderr=stderr,
        n=model.items.get(spec.id),
        conditions=Conditions(shots=spec.shots),
        contract=None,
        remark=PUBLISHED,
    )


def _shown(rows: list[ScoreRow]) -> list[ScoreRow]:
    filled = {(row.section, row.group) for row in rows if any(row.cells) and row.part}
    return [row for row in rows if any(row.cells) or (not row.part and (row.section, row.group) in filled)]


def read_scores(run: RunPaths, tokens: int | None, warn: Callable[[str], None]) -> RunScores:
    """Return the scores of a run's milestone.

    Args:
        tokens: the milestone's tokens; None: the newest evaluated milestone.
        warn: called with a message if the record of the run's contracts is damaged.
    """
    state = read_state(run)
    milestone = evaluated_milestone(run, state.milestones, tokens)
    try:
        recorded = contracts.read_record(run)
    except EvaluationError as error:
        warn(error.message)
        recorded = None
    return run_scores(
        run.run_id,
        milestone,
        simulated=state.simulated,
        contract=milestone.contract or None,
        recorded=recorded,
        imported=state.imported,
        name=state.labels.name,
    )


def evaluated_milestone(run: RunPaths, milestones: dict[int, MilestoneState], tokens: int | None) -> MilestoneState:
    """Return the evaluated milestone with these tokens, or the newest one.

    Raises:
        EvaluationError: the run has no evaluated milestone.
        ConfigError: it has none with these tokens.
    """
    evaluated = {at: milestone for at, milestone in milestones.items() if milestone.status == "evaluated"}
    if not evaluated:
        pending = ", ".join(f"{count(at)} {milestone.status}" for at, milestone in sorted(milestones.items()))
        raise EvaluationError(
            f"{run.run_id}: has no evaluated milestone" + (f" ({pending})" if pending else ""),
            hint=f"`hlatctl status {run.run_id}` shows the run's state",
        )
    if tokens is None:
        return evaluated[max(evaluated)]
    status = f" (its status is {milestones[tokens].status})" if tokens in milestones else ""
    error = f"--at={count(tokens)}: {run.run_id} has no evaluated milestone of {tokens:,} tokens{status}"
    return evaluated[find_milestone(tokens, evaluated, error)]
