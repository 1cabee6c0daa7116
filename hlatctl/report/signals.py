"""Which tasks are informative about a run of its size: their scores over milestones against guessing and noise.

A small model guesses at most tasks, and a task of few items is mostly noise. A task has a signal if its newest score is
at least :data:`CLEAR` standard errors better than guessing, or than the first milestone where guessing is unknown, and
if its scores do not get worse over the milestones (Spearman's rank correlation with the tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hlatctl.report.compare import evaluated_milestone
from hlatctl.report.scores import variant, with_variants
from hlatctl.report.tabular import aligned
from hlatctl.run import contract
from hlatctl.run.evaluations import ACCURACIES, HELD_OUT, LOWER_IS_BETTER, bits_of, headlines
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState, RunState

#: Standard errors above which a difference is not noise.
CLEAR = 2.0
#: Minimum number of milestones for an order.
ORDERED = 3


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One task or group over the milestones.

    Args:
        first, last, stderr: scores of the first and the newest milestone, and the standard error of the newest.
        chance: the score of guessing; None if unknown.
        above, rise: standard errors by which the newest score is better than guessing, and than the first one; None if
            unknown.
        order: Spearman's rank correlation of tokens and scores, positive if scores get better; None with fewer than
            three milestones.
    """

    task: str
    metric: str
    milestones: int
    first: float
    last: float
    stderr: float | None
    chance: float | None
    above: float | None
    rise: float | None
    order: float | None

    @property
    def speaks(self) -> bool:
        """Whether the task has a signal."""
        clear = self.rise if self.above is None else self.above
        return clear is not None and clear >= CLEAR and (self.order is None or self.order >= 0.0)


def read_signals(run: RunPaths, *, variants: bool = False) -> list[Signal]:
    """Return the signals of a run's headline tasks under its own contract; ``variants`` adds accuracies by length.

    EvaluationError: the run has no evaluated milestone.
    """
    state = read_state(run)
    evaluated_milestone(run, state.milestones, None)
    milestones = own_milestones(state, contract.own_contracts(run))
    return signals([with_variants(run, each) for each in milestones] if variants else milestones, variants=variants)


def own_milestones(state: RunState, own: str) -> list[MilestoneState]:
    """Return a run's evaluated milestones under its own contract, ascending."""
    return [
        milestone
        for _, milestone in sorted(state.milestones.items())
        if milestone.status == "evaluated" and milestone.contract in ("", own)
    ]


def of_report(state: RunState) -> list[Signal]:
    """Return the signals of a run that was trained and has enough milestones for an order; otherwise none."""
    milestones = own_milestones(state, state.contract)
    return signals(milestones) if len(milestones) >= ORDERED and not state.simulated else []


def signals(milestones: Sequence[MilestoneState], *, variants: bool = False) -> list[Signal]:
    """Return the signals of all headlines of the newest of some milestones, each with its bits per byte; pure."""
    scores = milestones[-1].scores if milestones else {}
    names = [name for name in headlines(scores) if not name.startswith(HELD_OUT)]
    more = ACCURACIES if variants else ()
    asked = [each for name in names for each in (name, *(variant(name, metric) for metric in more), bits_of(name))]
    return [_signal(name, milestones) for name in asked if name in scores]


def text(rows: Sequence[Signal]) -> str:
    """Return a table, with a mark at each task that has a signal."""
    header, cells = table(rows)
    return "\n".join([*aligned([header, *cells], left=2), "", note(rows)]) + "\n"


def table(rows: Sequence[Signal]) -> tuple[list[str], list[list[str]]]:
    """Return a header, and the cells of each row."""
    head = "task metric milestones first newest error guessing above rise order signal"
    return head.split(), [_cells(row) for row in rows]


def note(rows: Sequence[Signal]) -> str:
    """Return how many rows have a signal, and the rule."""
    said = sum(row.speaks for row in rows)
    rule = f"{CLEAR:g} standard errors better than guessing, or than the first milestone; scores don't get worse"
    return f"{said} of {len(rows)} have a signal: {rule}"


def _signal(name: str, milestones: Sequence[MilestoneState]) -> Signal:
    points = [(m.milestone_tokens, m.scores[name]) for m in milestones if _is_number(m.scores.get(name))]
    values = [float(score["value"]) for _, score in points]
    first_error, error = (_known(points[at][1].get("stderr")) for at in (0, -1)) if points else (None, None)
    both = math.hypot(first_error, error) if first_error is not None and error is not None else 0.0
    metric = str(points[-1][1].get("metric", "")) if points else ""
    guessing = _known(points[-1][1].get("chance")) if points else None
    better = -1.0 if metric in LOWER_IS_BETTER else 1.0
    order = _order([tokens for tokens, _ in points], values)
    return Signal(
        task=name,
        metric=metric,
        milestones=len(points),
        first=values[0] if values else math.nan,
        last=values[-1] if values else math.nan,
        stderr=error,
        chance=guessing,
        above=better * (values[-1] - guessing) / error if guessing is not None and error else None,
        rise=better * (values[-1] - values[0]) / both if both and len(values) > 1 else None,
        order=None if order is None else better * order,
    )


def _order(tokens: list[int], values: list[float]) -> float | None:
    if len(values) < ORDERED:
        return None
    if len(set(values)) == 1:
        return 0.0
    from scipy.stats import spearmanr

    return float(spearmanr(tokens, values).statistic)


def _is_number(score: Any) -> bool:
    value = score.get("value") if isinstance(score, dict) else None
    return isinstance(value, int | float) and math.isfinite(value)


def _known(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _cells(row: Signal) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        row.task,
        row.metric,
        str(row.milestones),
        f"{row.first:.4f}",
        f"{row.last:.4f}",
        shown(row.stderr, ".4f"),
        shown(row.chance, ".4f"),
        shown(row.above, "+.1f"),
        shown(row.rise, "+.1f"),
        shown(row.order, "+.2f"),
        "yes" if row.speaks else "",
    ]
