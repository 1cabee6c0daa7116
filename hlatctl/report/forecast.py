"""What many rehearsals of a run say together: how long, how dear, how much of it lost; as plain values and as text."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlatctl.units import duration, utc

HEADER = ("variant", "takes", "uptime", "goodput", "lost work", "failures", "USD")


@dataclass(frozen=True, kw_only=True)
class Course:
    """What one course of a run came to.

    Args:
        seed: it was drawn with.
        message: why it did not reach its last step; empty if it did.
        wall_s: from the run's creation to its end.
        uptime_fraction, goodput_fraction: as `hlatctl goodput` has them.
        lost_s: steps that had to be done again.
        failures: attempts that ended without a last checkpoint.
    """

    seed: int
    message: str
    wall_s: float
    uptime_fraction: float
    goodput_fraction: float
    lost_s: float
    failures: int
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of a figure over all courses, and its 5th and 95th percentiles: rough ones if the courses are few."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From at least one value; between two of them in proportion."""
        # Twentieths; a single value is all of them.
        cuts = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=20, method="inclusive")
        return cls(low=cuts[0], median=cuts[9], high=cuts[-1])


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One variant's courses in figures.

    Args:
        unfinished: courses that did not reach the last step; the figures are of the others.
        cost_usd: None without ``cluster.price_usd_per_node_hour``.
    """

    courses: int
    unfinished: dict[int, str]
    wall_s: Spread
    uptime_fraction: Spread
    goodput_fraction: Spread
    lost_s: Spread
    failures: Spread
    cost_usd: Spread | None


def outlook(courses: Sequence[Course]) -> Outlook | None:
    """What the courses say together; None if none of them was finished."""
    finished = [course for course in courses if not course.message]
    if not finished:
        return None
    spreads = {
        name: Spread.of([getattr(course, name) for course in finished])
        for name in ("wall_s", "uptime_fraction", "goodput_fraction", "lost_s", "failures")
    }
    costs = [course.cost_usd for course in finished if course.cost_usd is not None]
    return Outlook(
        courses=len(courses),
        unfinished={course.seed: course.message for course in courses if course.message},
        cost_usd=Spread.of(costs) if costs else None,
        **spreads,
    )


def rows(variants: Mapping[str, Outlook | None]) -> list[list[str]]:
    """The table: a variant a row, ``median (5 % to 95 %)`` in the cells."""
    return [[name, *_cells(found)] for name, found in variants.items()]


def facts(found: Outlook, now_unix_s: float) -> list[tuple[str, str]]:
    """When it would be finished, if it began now."""
    ends = [utc(now_unix_s + seconds) for seconds in (found.wall_s.median, found.wall_s.high)]
    finished = found.courses - len(found.unfinished)
    of = f"of {finished} finished courses" if finished > 1 else "of the one finished course"
    known = [
        ("finished, if it began now", f"{ends[0]} (median {of}); {ends[1]} (95th percentile)"),
        ("courses", str(found.courses)),
        *(("not finished", f"seed {seed}: {message}") for seed, message in list(found.unfinished.items())[:3]),
    ]
    return known


def record(variants: Mapping[str, Outlook | None]) -> dict[str, object]:
    """As JSON values."""
    return {name: dataclasses.asdict(found) if found else None for name, found in variants.items()}


def _cells(found: Outlook | None) -> list[str]:
    if found is None:
        return ["never finished", *([""] * (len(HEADER) - 2))]

    def percent(spread: Spread) -> str:
        return f"{100 * spread.median:.2f} % ({100 * spread.low:.2f} to {100 * spread.high:.2f})"

    def time(spread: Spread) -> str:
        return f"{duration(spread.median)} ({duration(spread.low)} to {duration(spread.high)})"

    cost = "" if found.cost_usd is None else f"{found.cost_usd.median:,.0f}"
    return [
        time(found.wall_s),
        percent(found.uptime_fraction),
        percent(found.goodput_fraction),
        time(found.lost_s),
        f"{found.failures.median:.0f}",
        cost,
    ]
