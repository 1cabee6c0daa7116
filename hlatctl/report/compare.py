"""Runs' scores beside one another and beside published ones: which is best, which can't be told apart; pure.

Where scores come from is the command's business, how the table looks ``compare_tables``'.

Only what was measured alike is compared. In each row the leftmost run sets the contract; a score under another one, or
under an unknown one, is shown and stays out of the comparison, and so does a simulated one. Published figures take
part, and are marked as such.

Two values tie if their difference is within ``Z_95`` standard errors of the difference: a two-sided z-test at 95 % for
independent samples. Runs that answer the same items err alike, so for them the test errs to the side of a tie. A
standard error that is not known counts as none: a tie is one whatever it is, but some go unseen.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

from hlatctl.report import baselines
from hlatctl.report.baselines import Baselines, Layout, Model, RowSpec, RowTitle
from hlatctl.report.numbers import finite_or_nan
from hlatctl.run.scores import HELD_OUT
from hlatctl.run.state import MilestoneState

#: Two-sided 95 %.
Z_95 = NormalDist().inv_cdf(0.975)
#: Standings of a cell in its row.
BEST, TIE = "best", "tie"
#: Remarks on a cell; all but the first keep it out of the comparison.
PUBLISHED, OTHER_CONTRACT, NO_CONTRACT, SIMULATED = "published", "another_contract", "contract_unknown", "simulated"
RUN, BASELINE = "run", "baseline"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One score of a run, as the harness gives it; ``contract`` is None if it is not known."""

    metric: str
    value: float
    stderr: float | None
    n: int | None
    contract: str | None


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """The scores of one run's milestone, by name."""

    run_id: str
    tokens: int
    step: int
    simulated: bool
    scores: dict[str, Measured]

    @property
    def contracts(self) -> list[str]:
        """What the scores were measured under, as far as it is known; the held-out text has one of its own."""
        tasks = [score for name, score in self.scores.items() if not name.startswith(HELD_OUT)]
        return sorted({score.contract for score in tasks or self.scores.values() if score.contract})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value in its row's unit.

    Args:
        stderr: standard error; of a mean over tasks that is taken here it is the mean of theirs, as the paper has it.
        n: items that the value is taken over.
        contract: of several scores, theirs joined by ``+``.
        standing: ``best``, ``tie`` (can't be told from the best) or empty.
        remark: why it is not, or not simply, comparable; empty if it is.
    """

    value: float
    stderr: float | None
    n: int | None
    contract: str | None
    standing: str = ""
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One run, or one published model; ``source`` is where its figures were published."""

    name: str
    kind: str
    tokens: int
    step: int | None
    contracts: list[str]
    simulated: bool
    source: str | None


@dataclass(frozen=True, kw_only=True)
class Row(RowTitle):
    """One row; None is a value that its column does not have."""

    cells: list[Cell | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole table; ``notes`` are those of the published figures."""

    columns: list[Column]
    rows: list[Row]
    notes: list[str]


def run_scores(run_id: str, milestone: MilestoneState, *, simulated: bool, contract: str | None) -> RunScores:
    """A milestone's scores; what is damaged or no number is left out.

    Args:
        run_id: the run's.
        milestone: an evaluated one.
        simulated: nothing was trained.
        contract: of scores that do not name their own.
    """
    found = {}
    for name, record in milestone.scores.items():
        value = finite_or_nan(record.get("value")) if isinstance(record, dict) else math.nan
        if not math.isnan(value):
            found[str(name)] = _measured(record, value, contract)
    return RunScores(
        run_id=run_id, tokens=milestone.milestone_tokens, step=milestone.step, simulated=simulated, scores=found
    )


def compare(runs: Sequence[RunScores], published: Baselines | None = None) -> Comparison:
    """The table of some runs and, after them, of published models."""
    models = published.models if published else ()
    columns = [
        Column(name=run.run_id, kind=RUN, tokens=run.tokens, step=run.step, contracts=run.contracts,
               simulated=run.simulated, source=None)
        for run in runs
    ]  # fmt: skip
    columns += [
        Column(name=model.name, kind=BASELINE, tokens=model.tokens, step=None, contracts=[], simulated=False,
               source=published.source if published else None)
        for model in models
    ]  # fmt: skip
    layout = baselines.layout()
    rows = [_row(spec, runs, models) for spec in (*layout.rows, *_others(layout, runs))]
    return Comparison(columns=columns, rows=_shown(rows), notes=list(published.notes) if published else [])


def _measured(record: Mapping[str, Any], value: float, contract: str | None) -> Measured:
    stderr, count, own = finite_or_nan(record.get("stderr")), record.get("n"), record.get("contract")
    return Measured(
        metric=str(record.get("metric", "")), value=value, stderr=None if math.isnan(stderr) else stderr,
        n=count if isinstance(count, int) else None, contract=str(own) if own else contract,
    )  # fmt: skip


def _names(task: str, metric: str) -> tuple[str, str]:
    """What a task's score may be called: the task, or for one of several metrics ``humaneval_pass_at_10``."""
    return task, f"{task}_{metric.replace('@', '_at_')}"


def _find(run: RunScores, task: str, metric: str) -> Measured | None:
    found = (run.scores.get(name) for name in _names(task, metric))
    return next((score for score in found if score and score.metric == metric), None)


def _all(run: RunScores, wanted: Mapping[str, str]) -> list[Measured] | None:
    found = [score for task, metric in wanted.items() if (score := _find(run, task, metric))]
    return found if len(found) == len(wanted) else None


def _others(layout: Layout, runs: Sequence[RunScores]) -> list[RowSpec]:
    """A row for every score that no row of the layout takes."""
    wanted = {pair for row in layout.rows for scores in row.of for pair in scores.items()}
    taken = {(name, metric) for task, metric in wanted for name in _names(task, metric)}
    found = {(name, score.metric) for run in runs for name, score in run.scores.items()} - taken
    kept = [pair for pair in found if not any(fnmatch.fnmatchcase(pair[0], p) for p in layout.left_out)]
    return [
        RowSpec(
            id=name, section=layout.others, group=name, part="", shots=None, metric=metric, of=({name: metric},),
            unit=baselines.PERCENT if metric in layout.fractions else baselines.PLAIN,
            best=layout.fractions.get(metric, baselines.UNKNOWN),
        )
        for name, metric in sorted(kept, key=lambda pair: (pair[1] not in layout.fractions, pair))
    ]  # fmt: skip


def _row(spec: RowSpec, runs: Sequence[RunScores], models: Sequence[Model]) -> Row:
    cells = _judged(spec.best, [*(_run_cell(spec, run) for run in runs), *(_model_cell(spec, m) for m in models)])
    return Row(**{field.name: getattr(spec, field.name) for field in fields(RowTitle)}, cells=cells)


def _run_cell(spec: RowSpec, run: RunScores) -> Cell | None:
    """The mean over the row's scores; None if the run has none of the alternatives whole."""
    found = next((scores for wanted in spec.of if (scores := _all(run, wanted))), None)
    if found is None:
        return None
    scale = 100.0 if spec.unit == baselines.PERCENT else 1.0
    errors = [score.stderr for score in found if score.stderr is not None]
    counts = [score.n for score in found if score.n is not None]
    contracts = [score.contract for score in found if score.contract]
    whole = len(found)
    return Cell(
        value=scale * math.fsum(score.value for score in found) / whole,
        stderr=scale * math.fsum(errors) / whole if len(errors) == whole else None,
        n=sum(counts) if len(counts) == whole else None,
        contract="+".join(dict.fromkeys(contracts)) if len(contracts) == whole else None,
        remark=SIMULATED if run.simulated else "",
    )


def _model_cell(spec: RowSpec, model: Model) -> Cell | None:
    if spec.id not in model.figures:
        return None
    value, stderr = model.figures[spec.id]
    return Cell(value=value, stderr=stderr, n=None, contract=None, remark=PUBLISHED)


def _judged(ideal: str | float, cells: list[Cell | None]) -> list[Cell | None]:
    """The cells with their remarks and standings; fewer than two that can be compared have none."""
    marked = _marked(cells)
    compared = [cell for cell in marked if cell and _takes_part(cell)]
    if len(compared) < 2 or ideal == baselines.UNKNOWN:
        return marked
    best = min(compared, key=lambda cell: _badness(cell, ideal))
    return [
        replace(cell, standing=_standing(cell, best, ideal)) if cell and _takes_part(cell) else cell for cell in marked
    ]


def _takes_part(cell: Cell) -> bool:
    return cell.remark in ("", PUBLISHED)


def _marked(cells: list[Cell | None]) -> list[Cell | None]:
    measured = [cell.contract for cell in cells if cell and not cell.remark and cell.contract]
    reference = measured[0] if measured else None

    def mark(cell: Cell | None) -> Cell | None:
        if cell is None or cell.remark or (cell.contract and cell.contract == reference):
            return cell
        return replace(cell, remark=OTHER_CONTRACT if cell.contract else NO_CONTRACT)

    return [mark(cell) for cell in cells]


def _standing(cell: Cell, best: Cell, ideal: str | float) -> str:
    difference = _badness(cell, ideal) - _badness(best, ideal)
    if difference == 0.0:
        return BEST
    return TIE if difference <= Z_95 * math.hypot(cell.stderr or 0.0, best.stderr or 0.0) else ""


def _badness(cell: Cell, ideal: str | float) -> float:
    """How far a value is from the best there could be, up to a constant."""
    if isinstance(ideal, str):
        return -cell.value if ideal == baselines.HIGHEST else cell.value
    return abs(cell.value - ideal)


def _shown(rows: list[Row]) -> list[Row]:
    """Rows that a column has a value for, and above parts of a group the group's own."""
    filled = {(row.section, row.group) for row in rows if any(row.cells) and row.part}
    return [row for row in rows if any(row.cells) or (not row.part and (row.section, row.group) in filled)]
