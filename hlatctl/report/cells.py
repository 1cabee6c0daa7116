"""The cells of a row of a comparison: which can be compared, which is best, which can't be told from it; pure.

Only what was measured alike is compared. In each row the leftmost run sets the contract; a score under another one, or
under an unknown one, is shown and stays out of the comparison, and so does a simulated one. Published figures take part
where that run was measured as they were: with the same shots, on all items, and on as many as far as that is published.

Two values tie if their difference is within ``Z_95`` standard errors of the difference: a two-sided z-test at 95 % for
independent samples. Runs that answer the same items err alike, so for them the test errs to the side of a tie. A
standard error that is not known counts as none: a tie is one whatever it is, but some go unseen. A value is best only
if it ties with no other, and if for every other one of the two standard errors is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from hlatctl.report import baselines
from hlatctl.report.conditions import Conditions

#: Two-sided 95 %.
Z_95 = NormalDist().inv_cdf(0.975)
#: Standings of a cell in its row.
BEST, TIE = "best", "tie"
#: Remarks on a cell; all but the first keep it out of the comparison.
PUBLISHED, OTHER_CONTRACT, NO_CONTRACT, SIMULATED = "published", "another_contract", "contract_unknown", "simulated"
PUBLISHED_OTHERWISE = "published_otherwise"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value in its row's unit.

    Args:
        stderr: standard error; of a mean over tasks that is taken here, that of independent tasks.
        n: items that the value is taken over.
        conditions: how it was measured; of a published value as far as that is published.
        contract: of several scores, theirs joined by ``+``.
        standing: ``best``, ``tie`` (can't be told from the best) or empty.
        remark: why it is not, or not simply, comparable; empty if it is.
    """

    value: float
    stderr: float | None
    n: int | None
    conditions: Conditions
    contract: str | None
    standing: str = ""
    remark: str = ""


def judged(ideal: str | float, cells: list[Cell | None]) -> list[Cell | None]:
    """The cells with their standings; fewer than two that can be compared have none."""
    compared = [cell for cell in cells if cell and _takes_part(cell)]
    if len(compared) < 2 or ideal == baselines.UNKNOWN:
        return cells
    top = min(compared, key=lambda cell: _badness(cell, ideal))
    others = [cell for cell in compared if cell is not top]
    tied = [cell for cell in others if _ties(cell, top, ideal)]
    alone = not tied and all(cell.stderr is not None or top.stderr is not None for cell in others)

    def standing(cell: Cell) -> str:
        if cell is top:
            return BEST if alone else TIE if tied else ""
        return TIE if any(cell is other for other in tied) else ""

    return [replace(cell, standing=standing(cell)) if cell and _takes_part(cell) else cell for cell in cells]


def _takes_part(cell: Cell) -> bool:
    return cell.remark in ("", PUBLISHED)


def marked(cells: list[Cell | None]) -> list[Cell | None]:
    """The cells with their remarks: those that the leftmost run of a known contract can't be compared with."""
    reference = next((cell for cell in cells if cell and not cell.remark and cell.contract), None)
    # What one published value was taken over is the benchmark's size, which holds for those that do not say.
    sizes = {cell.n for cell in cells if cell and cell.remark == PUBLISHED and cell.n is not None}

    def mark(cell: Cell | None) -> Cell | None:
        if cell is None or cell.remark not in ("", PUBLISHED):
            return cell
        if cell.remark == PUBLISHED:
            alike = reference is None or _as_published(reference, cell, sizes)
            return cell if alike else replace(cell, remark=PUBLISHED_OTHERWISE)
        if reference and cell.contract == reference.contract:
            return cell
        return replace(cell, remark=OTHER_CONTRACT if cell.contract else NO_CONTRACT)

    return [mark(cell) for cell in cells]


def _as_published(measured: Cell, published: Cell, sizes: set[int]) -> bool:
    """The same shots, all items, and as many as far as that is published; not if nobody knows how it was measured."""
    own = measured.conditions
    same_items = not sizes or measured.n in sizes
    return own.whole is True and own.shots == published.conditions.shots and same_items


def _ties(cell: Cell, top: Cell, ideal: str | float) -> bool:
    difference = _badness(cell, ideal) - _badness(top, ideal)
    return difference <= Z_95 * math.hypot(cell.stderr or 0.0, top.stderr or 0.0)


def _badness(cell: Cell, ideal: str | float) -> float:
    """How far a value is from the best there could be, up to a constant."""
    if isinstance(ideal, str):
        return -cell.value if ideal == baselines.HIGHEST else cell.value
    return abs(cell.value - ideal)
