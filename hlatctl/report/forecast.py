"""Summarise many simulations of a run: duration, cost and lost work, as values, text and a figure."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlatctl.report.figures.figure import HIGHLIGHT, INK, Figure
from hlatctl.run.state import RunState
from hlatctl.units import counted, duration, utc

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Header of the table, which fits 100 columns: medians, and the 95th percentile of the duration.
HEADER = ("variant", "duration", "p95", "uptime", "goodput", "lost work", "failures", "USD")
#: Messages of unfinished simulations that are printed of each variant.
_MESSAGES = 2


#: Header of the table of losses.
LOSSES_HEADER = ("cause of restarts", "times", "down", "detected in", "waits, checks", "restarts", "lost steps")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What restarts with one cause have cost, in seconds.

    Args:
        detect_s: until the driver knew of the ends.
        wait_s: until the next attempts began: delays, checks of nodes, a person.
        start_s: until their first steps.
        lost_s: time of the steps that were redone. The run was up in it.
    """

    times: int = 0
    detect_s: float = 0.0
    wait_s: float = 0.0
    start_s: float = 0.0
    lost_s: float = 0.0

    @property
    def down_s(self) -> float:
        """The time in which the run was not up."""
        return self.detect_s + self.wait_s + self.start_s

    def __add__(self, other: Loss) -> Loss:
        """Return the sum."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Loss(**{name: mine[name] + theirs[name] for name in mine})


def losses(state: RunState, lost_s: float) -> dict[str, Loss]:
    """Return what the restarts of a run have cost, by cause.

    Args:
        lost_s: time of all steps that were redone.
    """
    found: dict[str, Loss] = {}
    redone: list[tuple[str, int]] = []
    for before, after in itertools.pairwise(state.attempts):
        ended_unix_s = before.ended_unix_s or after.started_unix_s
        first_unix_s = after.first_step_unix_s or after.ended_unix_s or after.started_unix_s
        loss = Loss(
            times=1,
            detect_s=before.detect_s or 0.0,
            wait_s=(before.decide_s or 0.0) + max(0.0, after.started_unix_s - ended_unix_s),
            start_s=max(0.0, first_unix_s - after.started_unix_s),
        )
        found[before.cause] = found.get(before.cause, Loss()) + loss
        redone.append((before.cause, max(0, before.last_step - (after.resumed_from_step or 0))))
    each_s = lost_s / max(1, sum(steps for _, steps in redone))
    for cause, steps in redone:
        found[cause] += Loss(lost_s=steps * each_s)
    return found


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of one simulation.

    Args:
        message: why the run did not reach its last step; empty if it did.
        wall_s: time from the run's creation to its end.
        lost_s: time of the steps that were redone.
        failures: attempts that ended without a last checkpoint.
        steps: number of steps that count at the end.
        losses: what restarts have cost, by cause.
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
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)


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
        unfinished: messages of simulations that did not reach the last step, by seed. No spread includes them.
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
    """Return a row per variant: medians, and the 95th percentile of the duration."""
    return [[name, *_cells(forecast)] for name, forecast in variants.items()]


def loss_rows(simulations: Sequence[Simulation]) -> list[list[str]]:
    """Return a row for each cause of restarts, the costliest first: means of all simulations."""
    total: dict[str, Loss] = {}
    for cause, loss in (item for simulation in simulations for item in simulation.losses.items()):
        total[cause] = total.get(cause, Loss()) + loss
    ordered = sorted(total.items(), key=lambda item: -item[1].down_s)
    return [
        _loss_cells(cause, loss, len(simulations)) for cause, loss in [*ordered, ("all", sum(total.values(), Loss()))]
    ]


def _loss_cells(cause: str, loss: Loss, simulations: int) -> list[str]:
    times = (loss.down_s, loss.detect_s, loss.wait_s, loss.start_s, loss.lost_s)
    name = cause.replace("_", " ")
    return [name, f"{loss.times / simulations:.1f}", *(duration(seconds / simulations) for seconds in times)]


def facts(variants: Mapping[str, Outlook | None], seeds: int, now_unix_s: float) -> list[tuple[str, str]]:
    """Return when the run, the first of ``variants``, would finish if it started now, and what did not finish."""
    configured = next(iter(variants.values()))
    each = (
        f"{counted(seeds, 'simulation')} of each of {counted(len(variants), 'variant')}, {seeds * len(variants)} in all"
    )
    lines = [("simulated", each)]
    if configured:
        finished = counted(configured.courses - len(configured.unfinished), "finished simulation")
        median, high = (utc(now_unix_s + seconds) for seconds in (configured.wall_s.median, configured.wall_s.high))
        lines += [
            ("end, if started now", f"{median} (median of {finished})"),
            ("at the latest (p95)", f"{high} (95 % of them end by then)"),
            *_ranges(configured),
        ]
    for name, forecast in variants.items():
        if forecast and forecast.unfinished:
            lines.append(("not finished", f"{len(forecast.unfinished)} of {forecast.courses} of {name}"))
            lines += [("", f"seed {seed}: {why}") for seed, why in list(forecast.unfinished.items())[:_MESSAGES]]
    return lines


def _ranges(forecast: Outlook) -> list[tuple[str, str]]:
    lost, wall, usd = forecast.lost_s, forecast.wall_s, forecast.cost_usd
    return [
        ("duration, p5 to p95", f"{duration(wall.low)} to {duration(wall.high)}"),
        ("lost work, p5 to p95", f"{duration(lost.low)} to {duration(lost.high)}"),
        *([("USD, p5 to p95", f"{usd.low:,.0f} to {usd.high:,.0f}")] if usd else []),
    ]


def figure(variants: Mapping[str, Sequence[Simulation]]) -> Figure:
    """Return the figure of each variant's wall times, with one mark per simulation."""
    days = {
        name: sorted(simulation.wall_s / 86400 for simulation in simulations if not simulation.message)
        for name, simulations in variants.items()
    }

    def plot(axes: Axes) -> None:
        for row, values in enumerate(reversed(list(days.values()))):
            if values:
                axes.plot(values, [row] * len(values), "|", color=INK, markersize=10, alpha=0.6)
                axes.plot(statistics.median(values), row, "o", color=HIGHLIGHT)
        axes.set_yticks(range(len(days)), list(days)[::-1])
        axes.set_ylim(-0.6, len(days) - 0.4)
        axes.set_xlabel("days from the run's creation to its end")

    return Figure(
        name="forecast",
        caption="Wall time of each simulation (marks) and their medians (dots).",
        header=["variant", "days"],
        rows=[[name, value] for name, values in days.items() for value in values],
        plot=plot,
        width_in=7.0,
        height_in=0.55 + 0.3 * len(variants),
    )


def record(variants: Mapping[str, Outlook | None]) -> dict[str, object]:
    """Return the variants as JSON values."""
    return {name: dataclasses.asdict(forecast) if forecast else None for name, forecast in variants.items()}


def _cells(forecast: Outlook | None) -> list[str]:
    if forecast is None:
        return ["never finished", *([""] * (len(HEADER) - 2))]

    cost = "" if forecast.cost_usd is None else f"{forecast.cost_usd.median:,.0f}"
    return [
        duration(forecast.wall_s.median),
        duration(forecast.wall_s.high),
        f"{forecast.uptime_fraction.median:.2%}",
        f"{forecast.goodput_fraction.median:.2%}",
        duration(forecast.lost_s.median),
        f"{forecast.failures.median:.0f}",
        cost,
    ]
