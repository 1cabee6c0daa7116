"""How the time was spent and what the tokens cost: horizontal bars with their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hlatctl.plan.budget import COMPARED_TOKENS
from hlatctl.report.figures.figure import FAINT, INK, SMALL_PT, Figure
from hlatctl.report.goodput import Goodput, Price, label
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Smaller shares have no bar; the table has them.
_LEAST_SHARE = 0.001
_ROW_IN, _REST_IN = 0.2, 0.55


def time(spent: Goodput) -> Figure:
    """Return the figure of the wall time by category."""
    shares = {category: seconds / spent.wall_s for category, seconds in spent.seconds.items() if spent.wall_s}
    shown = [category for category, share in shares.items() if share >= _LEAST_SHARE]
    names, percents = [label(category) for category in shown], [100 * shares[category] for category in shown]

    def plot(axes: Axes) -> None:
        _bars(axes, names, percents, [f"{percent:.1f} %" for percent in percents], "% of wall time")

    return Figure(
        name="time",
        caption="Wall time by category. Categories below 0.1 % are only in the table.",
        header=["category", "seconds", "share_percent"],
        rows=[[label(category), seconds, 100 * shares.get(category, 0)] for category, seconds in spent.seconds.items()],
        plot=plot,
        height_in=_REST_IN + _ROW_IN * len(shown),
    )


def cost(prices: Sequence[Price]) -> Figure | None:
    """Return the figure of the cost of the same number of tokens; None without a price."""
    if not prices:
        return None
    names, values = [price.name for price in prices], [price.usd for price in prices]
    share = prices[0].of_baseline_fraction
    note = "" if share is None else f" This run costs {100 * share:.0f} % of the baseline."

    def plot(axes: Axes) -> None:
        _bars(axes, names, values, [f"{usd:.2f}" for usd in values], f"USD per {count(COMPARED_TOKENS)} tokens")

    return Figure(
        name="cost",
        caption=f"Cost of {count(COMPARED_TOKENS)} tokens.{note}",
        header=["name", f"usd_per_{COMPARED_TOKENS}_tokens"],
        rows=[[price.name, price.usd] for price in prices],
        plot=plot,
        height_in=_REST_IN + _ROW_IN * len(prices),
    )


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], texts: Sequence[str], unit: str) -> None:
    colours = [INK, *[FAINT] * (len(values) - 1)]
    bars = axes.barh(names, values, color=colours, height=0.65)
    axes.bar_label(bars, texts, padding=2, fontsize=SMALL_PT)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values, default=1.0))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
