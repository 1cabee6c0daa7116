"""The training loss over tokens, and the loss on held-out text at the milestones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hlatctl.report.figures.axes import Marks, Series, over_tokens, robust_limits
from hlatctl.report.figures.figure import FAINT, HIGHLIGHT, INK, Figure
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, Numbers, comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FOUND = "validation_loss"


def loss(series: Series, run: Numbers, marks: Marks) -> Figure:
    """Return the figure. Its axis shows all but the highest 2 % of the points."""
    scores = comparable(run.milestones, _FOUND)  # scores under other contracts are only in the table
    scored = [(milestone.tokens, score.value) for milestone, score in scores if score.value is not None]
    low, high = series.bounds("loss")
    limits = robust_limits(low, [*high, *(value for _, value in scored)])
    header, rows = series.table("loss", "loss_nats_per_token")
    held_out = dict(scored)
    return Figure(
        name="loss",
        caption=_caption(high, limits, bool(scored)) + marks.caption(),
        header=[*header, "mean_of_steps", "validation_loss_nats_per_token"],
        rows=[
            *([*row, mean, None] for row, mean in zip(rows, series.values["smooth_loss"], strict=True)),
            *([tokens, *[None] * len(header), value] for tokens, value in held_out.items()),
        ],
        plot=lambda axes: _plot(axes, series, scored, limits, marks),
    )


def _caption(high: list[float], limits: tuple[float, float] | None, has_scores: bool) -> str:
    text = "Training loss" + (", and loss on held-out text at the milestones." if has_scores else ".")
    beyond = [value for value in high if limits and math.isfinite(value) and value > limits[1]]
    if beyond:
        text += f" The axis omits the highest {len(beyond)} of {len(high)} points, up to {max(beyond):.2f}."
    return text


def _plot(
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
