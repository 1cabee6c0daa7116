"""Figures of the training itself: loss, norms, learning rate, throughput, and throughput by number of nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from conf.schema import Config
from conf.training_rules import learning_rate as rate_of_step
from hlatctl.report.figures.figure import (
    DASHES,
    FAINT,
    GREEN,
    HEIGHT_IN,
    HIGHLIGHT,
    INK,
    MAX_POINTS,
    ORANGE,
    PURPLE,
    QUIET,
    SKY,
    Figure,
    Marks,
    Series,
    is_wide,
    legend,
    line,
    over_tokens,
    plain_log_ticks,
    robust_limits,
)
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, RULE, Numbers, Scaling, Spikes, comparable, finite_or_nan
from hlatctl.run.state import RunState
from hlatctl.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Lines with other colours; then other dashes and markers tell runs apart.
_COLOURS = (INK, HIGHLIGHT, GREEN, PURPLE, ORANGE, SKY)
_DASHED, _MARKERS = ("-", *DASHES), ("", "o", "s", "^")


def losses(runs: Mapping[str, Series]) -> Figure:
    """Return the figure of the smoothed training losses of several runs, by their titles."""
    known = {title: series for title, series in runs.items() if series.tokens}
    rows = [
        [title, *point]
        for title, series in known.items()
        for point in zip(series.tokens, series.values["smooth_loss"], strict=True)
    ]
    late = [[y for y in s.values["smooth_loss"][len(s.tokens) // 20 :] if math.isfinite(y)] for s in known.values()]
    limits = robust_limits(*[[y for values in late for y in values]] * 2)

    def plot(axes: Axes) -> None:
        for at, (title, series) in enumerate(known.items()):
            again = at // len(_COLOURS)
            axes.plot(
                series.tokens, series.values["smooth_loss"], label=title, color=_COLOURS[at % len(_COLOURS)],
                linestyle=_DASHED[again % len(_DASHED)], marker=_MARKERS[again % len(_MARKERS)],
                markevery=max(1, len(series.tokens) // 8),
            )  # fmt: skip
        axes.set_ylim(limits)
        axes.set_xlim(left=0)
        axes.locator_params(nbins=6)
        axes.xaxis.set_major_formatter(lambda value, _: count(value))
        axes.set_xlabel("tokens")
        axes.set_ylabel("training loss (nats/token)")
        legend(axes)

    return Figure(
        name="losses",
        caption=f"Training loss over tokens, means of up to {LOSS_WINDOW_STEPS} steps. The axis omits the first.",
        header=["run", "tokens", "training_loss_nats_per_token"],
        rows=rows,
        plot=plot,
        height_in=HEIGHT_IN + 0.16 * math.ceil(len(known) / 2) * (len(known) > 3),
    )


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


_HELD_OUT = "validation_loss"


def loss(series: Series, run: Numbers, marks: Marks) -> Figure:
    """Return the figure of the training loss, whose axis shows all but the highest 2 % of the points."""
    scores = comparable(run.milestones, _HELD_OUT)  # scores under other contracts are only in the table
    scored = [(milestone.tokens, score.value) for milestone, score in scores if score.value is not None]
    low, high = series.bounds("loss")
    limits = robust_limits(low, [*high, *(value for _, value in scored)])
    header, rows = series.table("loss", "loss_nats_per_token")
    held_out = dict(scored)
    return Figure(
        name="loss",
        caption=_loss_caption(high, limits, bool(scored)) + marks.caption(),
        header=[*header, "mean_of_steps", "validation_loss_nats_per_token"],
        rows=[
            *([*row, mean, None] for row, mean in zip(rows, series.values["smooth_loss"], strict=True)),
            *([tokens, *[None] * len(header), value] for tokens, value in held_out.items()),
        ],
        plot=lambda axes: _plot_loss(axes, series, scored, limits, marks),
    )


def _loss_caption(high: list[float], limits: tuple[float, float] | None, has_scores: bool) -> str:
    text = "Training loss" + (", and loss on held-out text at the milestones." if has_scores else ".")
    beyond = [value for value in high if limits and math.isfinite(value) and value > limits[1]]
    if beyond:
        text += f" The axis omits the highest {len(beyond)} of {len(high)} points, up to {max(beyond):.2f}."
    return text


def _plot_loss(
    axes: Axes, series: Series, scored: list[tuple[int, float]], limits: tuple[float, float] | None, marks: Marks
) -> None:
    if "loss" in series.ranges:
        axes.fill_between(series.tokens, *series.ranges["loss"], color=FAINT, linewidth=0, label="training, each step")
    else:
        axes.plot(series.tokens, series.values["loss"], color=FAINT, linewidth=0.7, label="training, each step")
    mean = f"training, mean of {LOSS_WINDOW_STEPS} steps"
    axes.plot(series.tokens, series.values["smooth_loss"], color=INK, label=mean)
    if scored:
        axes.plot(
            *zip(*scored, strict=True),
            "o",
            color=HIGHLIGHT,
            clip_on=False,
            zorder=4,
            label=f"held-out text, last {scored[-1][1]:.3f}",
        )
    if limits:
        axes.set_ylim(*limits)
    axes.set_ylabel("loss (nats per token)")
    over_tokens(axes, marks)


#: Spikes of at least this many steps share a bar.
_LONGEST_SPIKE = 10
#: Fewer spikes have no histogram.
_FEWEST_SPIKES = 5


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
    if len(spikes.lengths_steps) < _FEWEST_SPIKES:
        return None
    counts = Counter(min(length, _LONGEST_SPIKE) for length in spikes.lengths_steps)
    lengths = range(1, _LONGEST_SPIKE + 1)
    shares = [100 * counts[length] / len(spikes.lengths_steps) for length in lengths]
    labels = [f"≥ {_LONGEST_SPIKE}" if length == _LONGEST_SPIKE else str(length) for length in lengths]

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


def scaling(scale: Scaling) -> Figure | None:
    """Return the figure of throughput by nodes; None if fewer than two numbers of nodes are known."""
    sizes = sorted({*scale.planned, *scale.measured})
    if len(sizes) < 2:
        return None
    return Figure(
        name="scaling",
        caption=_scaling_caption(scale),
        header=["nodes", "planned_tokens_per_s", "measured_tokens_per_s", "efficiency_percent"],
        rows=[[nodes, scale.planned.get(nodes), scale.measured.get(nodes), _percent(scale, nodes)] for nodes in sizes],
        plot=lambda axes: _plot_scaling(axes, scale, sizes),
    )


def _scaling_caption(scale: Scaling) -> str:
    text = "Throughput over the number of nodes, with the same global batch."
    if not scale.planned:
        return text
    fewest = min(scale.planned)
    shares = (f"{percent:.0f} % on {nodes:,} nodes" for nodes in scale.measured if (percent := _percent(scale, nodes)))
    return f"{text} Measured efficiency, relative to the plan for {fewest:,} nodes: {', '.join(shares) or 'unknown'}."


def _plot_scaling(axes: Axes, scale: Scaling, sizes: list[int]) -> None:
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
