"""A run's scores at all its milestones next to published ones: the rows of HLAT's tables, and the run's other tasks.

Scores have only the metrics that a suite asks for. The files ``tasks/<task>.json`` of milestones also have accuracies
by length (``eval.normalised``), so that the most informative one for a small model needs no new evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hlatctl.report import baselines
from hlatctl.report.compare import PUBLISHED_OTHERWISE, Cell, Comparison, RunScores, ScoreRow, compare, run_scores
from hlatctl.run import contract, files
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import ACCURACIES, HELD_OUT, headlines
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState, RunState

#: The set of published scores that every report has.
PUBLISHED_SET = "hlat"
_EVALUATED = "evaluated"


@dataclass(frozen=True, kw_only=True)
class Course:
    """One row of the tables over a run's milestones.

    Args:
        points: tokens and cell of each score under the first score's contract, ascending.
        published: cells by model name.
    """

    row: ScoreRow
    points: list[tuple[int, Cell]]
    published: dict[str, Cell]

    @property
    def title(self) -> str:
        """Title of the measurement, such as ``MMLU (5-shot accuracy)``."""
        return f"{self.row.group} ({self.how})"

    @property
    def how(self) -> str:
        """How it was measured, such as ``5-shot accuracy``."""
        measured = self.points[-1][1].conditions.shots
        shots = self.row.shots if measured is None else measured
        return self.row.metric if shots is None else f"{shots}-shot {self.row.metric}"

    @property
    def chance(self) -> float | None:
        """The score of guessing, in the row's unit; None if it is unknown."""
        return self.points[-1][1].chance

    @property
    def is_better_low(self) -> bool:
        """Whether less is better."""
        return self.row.best == baselines.LOWEST

    @property
    def differs(self) -> bool:
        """Whether a published value has other or unknown shots or items."""
        return any(cell.remark == PUBLISHED_OTHERWISE for cell in self.published.values())


@dataclass(frozen=True, kw_only=True)
class RunCourses:
    """The scores of a run.

    Args:
        courses: rows of groups in the order of HLAT's tables, without the loss on held-out text.
        table: newest milestone and published models, for rows that the run has; None without a score.
    """

    courses: list[Course]
    table: Comparison | None


def read_courses(run: RunPaths, state: RunState) -> RunCourses:
    """Return the scores of a run's evaluated milestones."""
    recorded = None
    with suppress(EvaluationError):  # a damaged record: scores are compared by the hashes of their contracts
        recorded = contract.read_record(run)
    scored = [
        run_scores(
            run.run_id,
            milestone,
            simulated=state.simulated,
            contract=milestone.contract or None,
            recorded=recorded,
            imported=state.imported,
            name=state.labels.name,
        )
        for _, milestone in sorted(state.milestones.items())
        if milestone.status == _EVALUATED and milestone.scores
    ]
    return courses_of(scored, baselines.load(PUBLISHED_SET))


def courses_of(scored: Sequence[RunScores], published: baselines.Baselines) -> RunCourses:
    """Return the scores of milestones, ascending, next to published ones; pure."""
    if not scored:
        return RunCourses(courses=[], table=None)
    count = len(scored)
    rows = [row for row in compare(scored, published).rows if any(row.cells[:count]) and not _is_loss(row)]
    courses = [_course(row, scored, published) for row in rows if not row.part]
    return RunCourses(courses=courses, table=_table(scored[-1], published))


def _is_loss(row: ScoreRow) -> bool:
    return row.id.startswith(HELD_OUT)


def _course(row: ScoreRow, scored: Sequence[RunScores], published: baselines.Baselines) -> Course:
    own, models = row.cells[: len(scored)], row.cells[len(scored) :]
    points = [(run.tokens, cell) for run, cell in zip(scored, own, strict=True) if cell]
    return Course(
        row=row,
        points=[(tokens, cell) for tokens, cell in points if cell.contract == points[0][1].contract],
        published={model.name: cell for model, cell in zip(published.models, models, strict=True) if cell},
    )


def _table(newest: RunScores, published: baselines.Baselines) -> Comparison:
    whole = compare([newest], published)
    rows = [row for row in whole.rows if row.cells[0]]
    kept = [at for at in range(len(whole.columns)) if any(row.cells[at] for row in rows)]
    return replace(
        whole,
        columns=[whole.columns[at] for at in kept],
        rows=[replace(row, cells=[row.cells[at] for at in kept]) for row in rows],
        notes=whole.notes if len(kept) > 1 else [],
    )


def with_variants(run: RunPaths, milestone: MilestoneState) -> MilestoneState:
    """Return a milestone with a score ``<task>_<metric>`` for each accuracy of its headline tasks.

    Groups, and tasks whose file is missing or damaged, have none.
    """
    found = dict(milestone.scores)
    for task in headlines(milestone.scores):
        metrics = _metrics(run, milestone, task)
        for metric in ACCURACIES:
            if f"{metric},none" in metrics and metric != milestone.scores[task].get("metric"):
                found.setdefault(variant(task, metric), _score(metrics, metric))
    return replace(milestone, scores=found)


def variant(task: str, metric: str) -> str:
    """Return the name of a task's score by another metric."""
    return f"{task}_{metric}"


def _metrics(run: RunPaths, milestone: MilestoneState, task: str) -> dict[str, Any]:
    try:
        found = files.read_json(run.eval(milestone.milestone_tokens) / "tasks" / f"{task}.json")["metrics"]
    except (OSError, *DAMAGED):
        return {}
    return found if isinstance(found, dict) else {}


def _score(metrics: dict[str, Any], metric: str) -> dict[str, Any]:
    keys = {"value": metric, "stderr": f"{metric}_stderr", "chance": f"{metric}_chance"}
    return {"metric": metric, **{name: metrics.get(f"{key},none") for name, key in keys.items()}}
