"""The numbers of a training step: one row for each.

The columns of a folded run, the live page, the report's figures, the copies in MLflow and other mirrors, and the lines
on the terminal follow this table. So a new number needs the code that computes it and a row here. A number without a
row is also stored, drawn and copied, under its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class StepMetric:
    """A number of a step.

    Args:
        name: field of the ``step`` event.
        title: display name.
        unit: unit of the displayed value.
        scale: the stored value divided by this is the displayed value.
        kept: a column of the folded run, which costs 8 bytes a step. The others are in the journal alone.
        drawn: a curve on the live page.
        mirrored: copied to MLflow and other mirrors.
        steep: the first values are far from the rest.
        text: format of the displayed value in a line of text; empty: in no line.
        note: remark for readers of the journal.
    """

    name: str
    title: str
    unit: str = ""
    scale: float = 1.0
    kept: bool = True
    drawn: bool = True
    mirrored: bool = True
    steep: bool = False
    text: str = ""
    note: str = ""


#: In the order in which they are shown.
STEP_METRICS = (
    StepMetric(name="loss", title="Loss", unit="nats/token", steep=True, text="loss {:.4f}"),
    StepMetric(
        name="grad_norm",
        title="Gradient norm",
        steep=True,
        text="gradient norm {:.3f}",
        note="of the whole model, before clipping",
    ),
    StepMetric(name="param_norm", title="Parameter norm", note="of the whole model, before the update"),
    StepMetric(name="lr", title="Learning rate", text="lr {:.2e}"),
    StepMetric(name="tokens_per_s", title="Tokens/s", unit="tokens/s", text="{:,.0f} tokens/s"),
    StepMetric(
        name="tokens_per_s_per_device",
        title="Tokens/s/device",
        unit="tokens/s",
        kept=False,
        drawn=False,
        mirrored=False,
    ),
    StepMetric(
        name="mfu",
        title="MFU",
        unit="%",
        scale=0.01,
        kept=False,
        text="MFU {:.1f}%",
        note="null: the device's peak is unknown",
    ),
    StepMetric(
        name="memory_bytes",
        title="Memory",
        unit="GiB",
        scale=_GIB,
        note="of rank 0's process: PyTorch's allocated bytes of a GPU, a CPU's resident memory, null on Trainium",
    ),
    StepMetric(
        name="peak_memory_bytes",
        title="Peak memory",
        unit="GiB",
        scale=_GIB,
        kept=False,
        drawn=False,
        text="memory {:.2f} GiB",
        note="since the process started",
    ),
    StepMetric(name="data_wait_s", title="Data wait", unit="s"),
    StepMetric(name="step_s", title="Step time", unit="s", text="{:.3g} s/step"),
)
BY_NAME = {metric.name: metric for metric in STEP_METRICS}
#: Where a step is in its run and journal: whole numbers, and its time.
PLACE = ("step", "tokens", "attempt", "seq", "batch", "steps")
TIME = "time_unix_s"
#: ``v`` is the version of a line of the journal, ``after_unix_s`` orders an event after a clock was set back.
_KNOWN = frozenset((*BY_NAME, *PLACE, TIME, "after_unix_s", "kind", "v"))
#: Numbers without a row that a run keeps; further ones are in its journal alone.
MOST_OTHERS = 32
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def of(name: str) -> StepMetric:
    """Return the row of a number; a new one for a number without a row."""
    return BY_NAME.get(name) or StepMetric(name=name, title=name.replace("_", " ").capitalize())


def others(event: Mapping[str, Any]) -> list[str]:
    """Return the names of the numbers in a ``step`` event that have no row. Costs 0.2 us if there are none."""
    if event.keys() <= _KNOWN:
        return []
    return [
        name
        for name, value in event.items()
        if name not in _KNOWN and type(value) in (int, float) and _NAME.fullmatch(name)
    ]


def texts(event: Mapping[str, Any]) -> list[str]:
    """Return the numbers of a step as text, such as ``loss 4.1234``, without unknown ones."""
    return [
        metric.text.format(float(event[metric.name]) / metric.scale)
        for metric in STEP_METRICS
        if metric.text and event.get(metric.name) is not None
    ]
