"""Throughput by number of nodes, compared with linear scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hlatctl.report.figures.axes import plain_log_ticks
from hlatctl.report.figures.figure import HIGHLIGHT, INK, QUIET, Figure
from hlatctl.report.numbers import Scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def scaling(scale: Scaling) -> Figure | None:
    """Return the figure; None if fewer than two numbers of nodes are known."""
    sizes = sorted({*scale.planned, *scale.measured})
    if len(sizes) < 2:
        return None
    return Figure(
        name="scaling",
        caption=_caption(scale),
        header=["nodes", "planned_tokens_per_s", "measured_tokens_per_s", "efficiency_percent"],
        rows=[[nodes, scale.planned.get(nodes), scale.measured.get(nodes), _percent(scale, nodes)] for nodes in sizes],
        plot=lambda axes: _plot(axes, scale, sizes),
    )


def _caption(scale: Scaling) -> str:
    text = "Throughput over the number of nodes, with the same global batch."
    if not scale.planned:
        return text
    fewest = min(scale.planned)
    shares = (f"{percent:.0f} % on {nodes:,} nodes" for nodes in scale.measured if (percent := _percent(scale, nodes)))
    return f"{text} Measured efficiency, relative to the plan for {fewest:,} nodes: {', '.join(shares) or 'unknown'}."


def _plot(axes: Axes, scale: Scaling, sizes: list[int]) -> None:
    known = scale.planned or scale.measured
    fewest = min(known)
    linear = [known[fewest] / fewest * nodes for nodes in (sizes[0], sizes[-1])]
    axes.plot([sizes[0], sizes[-1]], linear, color=QUIET, linestyle=":", label="linear")
    if scale.planned:
        axes.plot(*zip(*scale.planned.items(), strict=True), color=INK, marker=".", label="plan")
    if scale.measured:
        axes.plot(*zip(*scale.measured.items(), strict=True), "o", color=HIGHLIGHT, markersize=4.5, label="this run")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{nodes:,}" for nodes in sizes])
    plain_log_ticks(axes)
    axes.set_xlabel("nodes")
    axes.set_ylabel("throughput (tokens/s)")
    axes.legend(loc="upper left")


def _percent(scale: Scaling, nodes: int) -> float | None:
    share = scale.efficiency(nodes)
    return None if share is None else 100 * share
