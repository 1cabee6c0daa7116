"""The learning rate and the throughput over tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from conf.schema import Config
from conf.training_rules import learning_rate as rate_of_step
from hlatctl.report.figures.axes import MAX_POINTS, Marks, Series, line, over_tokens, robust_limits
from hlatctl.report.figures.figure import INK, Figure
from hlatctl.run.state import RunState
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def learning_rate(series: Series, state: RunState, config: Config, marks: Marks) -> Figure:
    """Return the figure of the learning rate of the trained steps, and of the planned ones."""
    left = range(state.step + 1, config.total_steps + 1)
    steps = [*left[:: max(1, len(left) // MAX_POINTS)], left[-1]] if left else []
    planned = [(config.tokens_at(step), rate_of_step(step, config)) for step in steps]

    def plot(axes: Axes) -> None:
        line(axes, series, "lr")
        if planned:
            axes.plot(*zip(*planned, strict=True), color=INK, linestyle=":", label="planned")
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        axes.set_ylabel("learning rate")
        over_tokens(axes, marks)

    header, rows = series.table("lr", "learning_rate")
    return Figure(
        name="learning_rate",
        caption="Learning rate.",
        header=[*header, "planned"],
        rows=[*([*row, None] for row in rows), *([tokens, None, rate] for tokens, rate in planned)],
        plot=plot,
    )


def throughput(series: Series, marks: Marks) -> Figure:
    """Return the figure of tokens per second."""
    limits = robust_limits(*series.bounds("tokens_per_s"))
    header, rows = series.table("tokens_per_s", "tokens_per_s")

    def plot(axes: Axes) -> None:
        line(axes, series, "tokens_per_s")
        axes.set_ylim(0, limits[1] if limits else None)
        axes.yaxis.set_major_formatter(lambda value, _: count(value))
        axes.set_ylabel("throughput (tokens/s)")
        over_tokens(axes, marks)

    return Figure(name="throughput", caption="Throughput of each step.", header=header, rows=rows, plot=plot)


def data_wait(series: Series, marks: Marks) -> Figure | None:
    """Return the figure of the share of each step that was spent waiting for data; None if no step waited."""
    pairs = zip(series.values["data_wait_s"], series.values["step_s"], strict=True)
    shares = [100 * wait / step if step else math.nan for wait, step in pairs]
    if not any(share > 0 for share in shares):
        return None

    def plot(axes: Axes) -> None:
        axes.plot(series.tokens, shares, color=INK)
        limits = robust_limits(shares, shares)
        axes.set_ylim(0, max(1.0, limits[1]) if limits else None)
        axes.set_ylabel("waiting for data (% of step)")
        over_tokens(axes, marks)

    return Figure(
        name="data_wait",
        caption="Share of each step that was spent waiting for data.",
        header=["tokens", "data_wait_percent"],
        rows=list(zip(series.tokens, shares, strict=True)),
        plot=plot,
    )
