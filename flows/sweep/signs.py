"""Signs that a run diverges, from the events of the trainer's monitor. Pure.

HLAT (arXiv 2404.10630, section 4.3) recognizes diverging runs by their gradient norm and loss.
"""

from __future__ import annotations

import math

from hlatctl.run.journal import number
from hlatctl.run.state import RunState

#: A spike of the gradient norm that lasts this many steps is growth: the running mean has risen with it.
GROWTH_STEPS = 20
#: The norm must also exceed this multiple of the mean before the spike.
GROWTH_FACTOR = 2.0
#: Steps at the start and at the end of a run whose losses are compared.
WINDOW_STEPS = 20


def divergence(state: RunState) -> str:
    """Return why a run has diverged, in a sentence; empty if it has not."""
    return _not_finite(state) or _growing(state) or _above_start(state)


def _not_finite(state: RunState) -> str:
    """``train.on_nonfinite`` decides whether such a step ends the run."""
    attempt = state.attempt
    return attempt.evidence if attempt and attempt.cause == "nonfinite" and state.status == "failed" else ""


def _growing(state: RunState) -> str:
    spike = state.spikes[-1] if state.spikes else None
    if spike is None or "length_steps" in spike:
        return ""
    began, mean = int(spike["step"]), number(spike, "mean")
    now = number(state.last_step or {}, "grad_norm")
    if state.step - began < GROWTH_STEPS or not now > GROWTH_FACTOR * mean:
        return ""
    return (
        f"the gradient norm has grown for {state.step - began} steps, from a mean of {mean:.3g} before step {began} to "
        f"{now:.3g}"
    )


def _above_start(state: RunState) -> str:
    """The mean of the newest losses is above the largest of the first: noise alone doesn't raise a mean so far."""
    if len(state.steps) < 2 * WINDOW_STEPS:
        return ""
    worst = max(number(event, "loss") for event in state.steps.first(WINDOW_STEPS))
    newest = [number(event, "loss") for event in state.steps.last(WINDOW_STEPS)]
    mean = math.fsum(newest) / WINDOW_STEPS
    if not mean > worst:
        return ""
    return f"the loss of the last {WINDOW_STEPS} steps, {mean:.3f}, is above that of the first, at most {worst:.3f}"
