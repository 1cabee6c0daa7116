"""How many of a run's steps MLflow gets; the journal has all of them."""

from __future__ import annotations

import math

#: MLflow takes 0.1 ms of processor time for each of a step's ten values, and a chart shows at most 2,500 points.
MOST_STEPS = 100_000
#: All steps up to this one: people look at each step when a run begins.
FIRST_STEPS = 1_000


def every_steps(total_steps: int) -> int:
    """Return the steps from one that MLflow gets to the next.

    A power of two: if a run is extended, a later copy has some of the same steps.
    """
    return 1 << max(0, math.ceil(math.log2(max(1, total_steps) / MOST_STEPS)))


def copied_steps(total_steps: int) -> int:
    """Return how many of a run's steps MLflow gets in the end."""
    every, first = every_steps(total_steps), min(FIRST_STEPS, total_steps)
    later = total_steps // every - first // every
    return first + later + (total_steps > first and total_steps % every != 0)
