"""Summarise many simulations of a run: duration, cost and lost work, as values and as text."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlatctl.units import counted, duration, utc

HEADER = ("variant", "duration", "uptime", "goodput", "lost work", "failures", "USD")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of one simulation.

    Args:
        seed: of the random failures.
        message: why it did not reach its last step; empty if it did.
        wall_s: from the run's creation to its end.
        uptime_fraction, goodput_fraction: as in `hlatctl goodput`.
        lost_s: time of the steps that were redone.
        failures: attempts that ended without a last checkpoint.
        steps: that count at its end.
        seconds: the time by category, as in `hlatctl goodput`.
    """

    seed: int
    message: str
    wall_s: float
    uptime_fraction: float
    goodput_fraction: float
    lost_s: float
    failures: int
    cost_usd: float | None
    steps: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of a value over all simulations, and its 5th and 95th percentiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value, interpolated linearly."""
        # Cut points at every 5 %; statistics.quantiles needs at least two values.
        cuts = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=20, method="inclusive")
        return cls(low=cuts[0], median=cuts[9], high=cuts[-1])


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The simulations of one variant.

    Args:
        courses: number of simulations; the JSON key's older name.
        unfinished: messages of simulations that did not reach the last step, by seed. They are in no spread.
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


def outlook(simulations: Sequence[Simulation]) -> Outlook | None:
    """Return the summary of simulations; None if none finished."""
    finished = [simulation for simulation in simulations if not simulation.message]
    if not finished:
        return None
    spreads = {
        name: Spread.of([getattr(simulation, name) for simulation in finished])
        for name in ("wall_s", "uptime_fraction", "goodput_fraction", "lost_s", "failures")
    }
    costs = [simulation.cost_usd for simulation in finished if simulation.cost_usd is not None]
    return Outlook(
        courses=len(simulations),
        unfinished={each.seed: each.message for each in simulations if each.message},
        cost_usd=Spread.of(costs) if costs else None,
        **spreads,
    )


def rows(variants: Mapping[str, Outlook | None]) -> list[list[str]]:
    """Return a row per variant, with ``median (5 % to 95 %)`` in the cells."""
    return [[name, *_cells(forecast)] for name, forecast in variants.items()]


def facts(forecast: Outlook, now_unix_s: float) -> list[tuple[str, str]]:
    """Return when the run would finish if it started now, as name and text."""
    ends = [utc(now_unix_s + seconds) for seconds in (forecast.wall_s.median, forecast.wall_s.high)]
    finished = forecast.courses - len(forecast.unfinished)
    simulations = counted(finished, "finished simulation")
    return [
        ("finished, if started now", f"{ends[0]} (median of {simulations}); {ends[1]} (95th percentile)"),
        ("simulations", str(forecast.courses)),
        *(("not finished", f"seed {seed}: {message}") for seed, message in list(forecast.unfinished.items())[:3]),
    ]


def record(variants: Mapping[str, Outlook | None]) -> dict[str, object]:
    """Return the variants as JSON values."""
    return {name: dataclasses.asdict(forecast) if forecast else None for name, forecast in variants.items()}


def _cells(forecast: Outlook | None) -> list[str]:
    if forecast is None:
        return ["never finished", *([""] * (len(HEADER) - 2))]

    def percent(spread: Spread) -> str:
        return f"{100 * spread.median:.2f} % ({100 * spread.low:.2f} to {100 * spread.high:.2f})"

    def time(spread: Spread) -> str:
        return f"{duration(spread.median)} ({duration(spread.low)} to {duration(spread.high)})"

    cost = "" if forecast.cost_usd is None else f"{forecast.cost_usd.median:,.0f}"
    return [
        time(forecast.wall_s),
        percent(forecast.uptime_fraction),
        percent(forecast.goodput_fraction),
        time(forecast.lost_s),
        f"{forecast.failures.median:.0f}",
        cost,
    ]
