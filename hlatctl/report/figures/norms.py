"""The norms of gradients and of parameters over tokens, and the lengths of gradient spikes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hlatctl.report.figures.axes import Marks, Series, is_wide, line, over_tokens, plain_log_ticks
from hlatctl.report.figures.figure import HIGHLIGHT, INK, Figure
from hlatctl.report.numbers import RULE, Spikes, finite_or_nan
from hlatctl.run.state import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Spikes of at least this many steps share a bar.
_LONGEST = 10
#: Fewer spikes have no histogram.
_FEWEST = 5


def gradient_norm(series: Series, state: RunState, marks: Marks) -> Figure:
    """Return the figure of the gradient norm before clipping, with the spikes by HLAT's rule."""
    spikes = [
        (finite_or_nan(state.steps[at]["tokens"]), finite_or_nan(spike.get("grad_norm")))
        for spike in state.spikes
        if (at := int(spike.get("step", 0))) in state.steps
    ]
    header, rows = series.table("grad_norm", "gradient_norm")

    def plot(axes: Axes) -> None:
        line(axes, series, "grad_norm")
        if spikes:
            axes.plot(*zip(*spikes, strict=True), "^", color=HIGHLIGHT, markersize=2.5, label="spike")
        if is_wide(series.bounds("grad_norm")[1]):
            axes.set_yscale("log")
            plain_log_ticks(axes)
        axes.set_ylabel("gradient norm (L2)")
        over_tokens(axes, marks)

    return Figure(
        name="gradient_norm",
        caption="Gradient norm before clipping." + (f" Triangles are spikes: {RULE}." if spikes else ""),
        header=[*header, "spike"],
        rows=[*([*row, None] for row in rows), *([at, *[None] * (len(header) - 1), norm] for at, norm in spikes)],
        plot=plot,
    )


def parameter_norm(series: Series, marks: Marks) -> Figure:
    """Return the figure of the norm of all parameters."""
    header, rows = series.table("param_norm", "parameter_norm")

    def plot(axes: Axes) -> None:
        line(axes, series, "param_norm")
        axes.set_ylabel("parameter norm (L2)")
        over_tokens(axes, marks)

    return Figure(name="parameter_norm", caption="Norm of all parameters.", header=header, rows=rows, plot=plot)


def spike_lengths(spikes: Spikes) -> Figure | None:
    """Return the histogram of the lengths of gradient spikes; None for fewer than five."""
    if len(spikes.lengths_steps) < _FEWEST:
        return None
    counts = Counter(min(length, _LONGEST) for length in spikes.lengths_steps)
    lengths = range(1, _LONGEST + 1)
    shares = [100 * counts[length] / len(spikes.lengths_steps) for length in lengths]
    labels = [f"≥ {_LONGEST}" if length == _LONGEST else str(length) for length in lengths]

    def plot(axes: Axes) -> None:
        axes.bar(labels, shares, color=INK, width=0.6)
        axes.set_xlabel("length of spike (steps)")
        axes.set_ylabel("share of spikes (%)")

    return Figure(
        name="spike_lengths",
        caption=f"Lengths of gradient spikes. {spikes.in_words()}",
        header=["length_steps", "spikes", "share_percent"],
        rows=[[label, counts[at], share] for label, at, share in zip(labels, lengths, shares, strict=True)],
        plot=plot,
    )
