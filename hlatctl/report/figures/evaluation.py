"""Scores over tokens, one figure for each row of HLAT's tables, with standard errors and published models as lines."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from hlatctl.report.baselines import PERCENT
from hlatctl.report.figures.figure import DASHES, HEIGHT_IN, INK, OTHERS, QUIET, SMALL_PT, Figure, Marks, over_tokens
from hlatctl.report.scores import Course

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "evaluation_"
#: Figures on a page of each direction; the tables have every score.
_MOST = 12
#: Percentage points that an axis covers at least.
_LEAST_RANGE = 4.0
#: Height of a legend above a figure.
_LEGEND_IN = 0.35


def evaluations(courses: list[Course], marks: Marks) -> list[Figure]:
    """Return a figure for each of the first twelve rows where more is better, and where less is better.

    A row of one milestone has none, unless published scores can be compared with it: the tables show it.
    """
    courses = [course for course in courses if len(course.points) > 1 or course.published]
    high, low = ([course for course in courses if course.is_better_low == lower] for lower in (False, True))
    return [_evaluation(course, replace(marks, restarts=[])) for course in (*high[:_MOST], *low[:_MOST])]


def _evaluation(course: Course, marks: Marks) -> Figure:
    caption = f"{course.title} at the milestones, ± standard error."
    caption += " Less is better." if course.is_better_low else ""
    caption += f" The dashed line is the score of guessing, {course.chance:.4g}." if course.chance is not None else ""
    if course.published:
        caption += " Lines are published models" + (
            ", measured with other or unknown shots or items." if course.differs else "."
        )
    return Figure(
        name=f"{PREFIX}{course.row.id}",
        caption=caption,
        header=[
            "model",
            "tokens",
            course.row.metric + (f"_{PERCENT}" if course.row.unit == PERCENT else ""),
            "standard_error",
        ],
        rows=[
            *(["this run", tokens, cell.value, cell.stderr] for tokens, cell in course.points),
            *([name, None, cell.value, cell.stderr] for name, cell in course.published.items()),
            *(["guessing", None, course.chance, None] for _ in [1] if course.chance is not None),
        ],
        plot=lambda axes: _plot(axes, course, marks),
        height_in=HEIGHT_IN + _LEGEND_IN * bool(course.published),
    )


def _plot(axes: Axes, course: Course, marks: Marks) -> None:
    styles = zip(cycle(OTHERS), cycle(DASHES), strict=False)
    for (name, cell), (colour, dashes) in zip(course.published.items(), styles, strict=False):
        axes.axhline(cell.value, color=colour, linestyle=dashes, linewidth=0.8, label=name)
    if course.chance is not None:
        axes.axhline(course.chance, color=QUIET, linestyle="--", linewidth=0.8, label="guessing")
    axes.errorbar(
        [tokens for tokens, _ in course.points],
        [cell.value for _, cell in course.points],
        yerr=[cell.stderr or 0.0 for _, cell in course.points],
        color=INK,
        marker="o",
        clip_on=False,
        zorder=4,
        label="this run" if course.published or course.chance is not None else None,
    )
    axes.set_title(course.title, fontsize=SMALL_PT + 0.5, loc="left")
    axes.set_ylabel(f"{course.row.metric} (%)" if course.row.unit == PERCENT else course.row.metric)
    axes.margins(y=0.15)
    if course.row.unit == PERCENT:
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), max(high, low + _LEAST_RANGE))
    over_tokens(axes, marks)
