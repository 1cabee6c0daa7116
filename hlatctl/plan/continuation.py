"""What is left of a run that has begun, and how its learning rate goes on; pure."""

from __future__ import annotations

from conf.schedule import learning_rate
from conf.schema import Config
from hlatctl.plan.cost import cost
from hlatctl.plan.sections import DERIVED, Figure, Section
from hlatctl.plan.step_time import step_time
from hlatctl.units import count, duration

_WIDTH, _HEIGHT = 64, 10
#: A larger change of the rate from one step to the next is named.
_JUMP = 0.02


def continuation_section(before: Config, after: Config, step: int) -> Section:
    """Return what is left with a changed configuration.

    Args:
        before, after: the run's configuration, and the changed one.
        step: the last one that the run keeps.
    """
    left = after.total_steps - step
    figures = [
        Figure("steps done", step, f"{step:,}, {count(after.tokens_at(step))} tokens", DERIVED),
        Figure("last step", after.total_steps, _changed(before.total_steps, after.total_steps), DERIVED),
        Figure("steps left", left, f"{left:,}, {count(left * after.tokens_per_step)} tokens", DERIVED),
        Figure("learning rate of the next step", learning_rate(step + 1, after), _rate(before, after, step), DERIVED),
        Figure("learning rate of the last step", learning_rate(after.total_steps, after), _last(after), DERIVED),
    ]
    if (time := step_time(after)) is not None:
        whole = cost(after, time.total_s)
        share = left / after.total_steps
        figures.append(
            Figure("time left, if nothing breaks", left * time.total_s, duration(left * time.total_s), DERIVED)
        )
        if whole.usd is not None:
            figures.append(Figure("cost of that", whole.usd * share, f"{whole.usd * share:,.0f} USD", DERIVED))
    return Section("the rest of the run", figures)


def rate_chart(before: Config, after: Config, step: int) -> str:
    """Draw the learning rate over all steps as text: ``*`` with the change, ``.`` as it was planned."""
    last = max(before.total_steps, after.total_steps)
    steps = [1 + round(column * (last - 1) / (_WIDTH - 1)) for column in range(_WIDTH)]
    planned = [learning_rate(at, before) if at <= before.total_steps else None for at in steps]
    changed = [
        (learning_rate(at, before) if at <= step else learning_rate(at, after)) if at <= after.total_steps else None
        for at in steps
    ]
    highest = max(rate for rate in [*planned, *changed] if rate is not None)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for rates, mark in ((planned, "."), (changed, "*")):
        for column, rate in enumerate(rates):
            if rate is not None:
                rows[_HEIGHT - 1 - min(_HEIGHT - 1, int(rate / highest * (_HEIGHT - 1) + 0.5))][column] = mark
    now = min(_WIDTH - 1, round((step - 1) * (_WIDTH - 1) / max(1, last - 1))) if step else 0
    labels = [f"{highest:.2e}", *[""] * (_HEIGHT - 2), "0"]
    lines = [f"{label:>8} |{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*lines, f"{'':8} +{'-' * _WIDTH}", _axis(now, step, last)])


def _axis(now: int, step: int, last: int) -> str:
    end = f"step {last:,}"
    here = f"^ step {step:,}"
    line = f"{'':10}{' ' * now}{here}"
    room = 10 + _WIDTH - len(end)
    return f"{line:<{room}}{end}" if len(line) < room else f"{line}\n{'':{room}}{end}"


def _changed(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{after:,}, was {before:,}"


def _last(after: Config) -> str:
    return f"{learning_rate(after.total_steps, after):.3e}"


def _rate(before: Config, after: Config, step: int) -> str:
    """Return the rate of the next step, and how it continues the run's."""
    rate = learning_rate(step + 1, after)
    if step == 0:
        return f"{rate:.3e}"
    trained = learning_rate(step, before)
    ratio = rate / trained if trained else 1.0
    if abs(ratio - 1.0) < _JUMP:
        return f"{rate:.3e}, continues that of step {step:,}"
    text = f"{rate:.3e}, jumps {'up' if ratio > 1 else 'down'} from {trained:.3e} at step {step:,}"
    return f"{text}; the warm-up goes on" if step < after.warmup_steps else text
