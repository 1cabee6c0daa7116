"""Measurements of the benchmark ``gpu``, and the arithmetic of its table.

MFU has one count for all rows, the project's own (``conf.sizes.flops_per_token``), and one table of peaks
(``conf.devices``). A peer's own count is not used.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from conf import sizes
from conf.schema import Config

#: Steps of each process that compile, fill caches and let clocks settle; they are not counted.
SKIP_STEPS = 5

COUNTING = (
    "MFU: 6 x parameters (without the embedding) + 12 x layers x width of all heads x sequence FLOPs per token;\n"
    "recomputation does not count"
)
_HEAD = f"{'median s':>9s} {'min s':>8s} {'tokens/s':>10s} {'MFU':>6s} {'peak GiB':>9s} {'loss':>7s} {'waits':>6s}"
#: The line of a traceback that names the error; later lines may be advice.
_ERROR = re.compile(r"^(\[rank\d+\]: )?[\w.]*(Error|Exception|Exit)(:|$)")


@dataclass(frozen=True)
class Measured:
    """One or more rounds of a case.

    Args:
        steps_s: seconds of each counted step.
        parameters: parameters of the trained model; None: not counted.
        peak_bytes: peak memory, by the device's count or, on a CPU, of the whole process.
        loss: loss of the last step.
        data_wait: the share of the time in which a step waited for data; None: not measured.
        notes: lines to print below the row.
    """

    steps_s: tuple[float, ...]
    parameters: int | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    data_wait: float | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, printed: Mapping[str, Any]) -> Measured:
        """Return what a case's process printed, without its first steps."""
        own = {**printed, "notes": tuple(printed.get("notes", ()))}
        return cls(**own | {"steps_s": tuple(printed.get("steps_s", ())[SKIP_STEPS:])})

    @classmethod
    def kept(cls, result: Mapping[str, Any]) -> Measured:
        """Return what ``dataclasses.asdict`` made of a measurement, among other fields, and JSON kept."""
        found = {field.name: result[field.name] for field in fields(cls)}
        return cls(**found | {"steps_s": tuple(found["steps_s"]), "notes": tuple(found["notes"])})

    def and_round(self, later: Measured) -> Measured:
        """Return this and a later round together."""
        peaks = [peak for peak in (self.peak_bytes, later.peak_bytes) if peak is not None]
        return replace(later, steps_s=self.steps_s + later.steps_s, peak_bytes=max(peaks, default=None))

    def tokens_per_s(self, config: Config) -> float:
        """Return the tokens/s of the median step."""
        return config.tokens_per_step / statistics.median(self.steps_s)

    def problem(self, config: Config) -> str | None:
        """Return why the figures can't be compared with those of the configuration's model; None if they can."""
        expected = sizes.parameters(config.model).total
        if self.parameters not in (None, expected):
            return f"its model has {self.parameters:,} parameters, not {expected:,}"
        return None if self.steps_s else f"it ran at most {SKIP_STEPS} steps, which are not counted"


def head() -> str:
    return f"{'':36s} {_HEAD}"


def row(name: str, measured: Measured, config: Config, peak_flops_per_s: float | None) -> str:
    """Return a row of the table.

    Args:
        measured: all rounds so far.
        peak_flops_per_s: peak of the device, for the case's number format; if None, MFU is unknown.
    """
    tokens_per_s = measured.tokens_per_s(config)
    mfu = sizes.mfu(config, tokens_per_s, peak_flops_per_s)
    return " ".join(
        (
            f"{name:36s} {statistics.median(measured.steps_s):9.4f} {min(measured.steps_s):8.4f} {tokens_per_s:10,.0f}",
            _cell(mfu, "6.1%"),
            _cell(None if measured.peak_bytes is None else measured.peak_bytes / 2**30, "9.2f"),
            _cell(measured.loss, "7.3f"),
            _cell(measured.data_wait, "6.2%"),
        )
    )


def compared(rates: Mapping[str, float], base: str) -> list[str]:
    """Return a title, and for each case its tokens/s and how many times those of the case ``base`` they are.

    Args:
        rates: tokens/s of each measured case, all with the same model and batch.
        base: the case that has 1.00.
    """
    if base not in rates:
        return []
    lines = [f"{name:36s} {rate:10,.0f} tokens/s {rate / rates[base]:6.2f}" for name, rate in rates.items()]
    return ["", f"Compared with {base}, by the median steps of all rounds:", *lines]


def reason(stderr: str) -> str:
    """Return the line that names the error in what a failed process wrote, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["it printed nothing"]
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])[:200]


def _cell(value: float | None, form: str) -> str:
    return format("?", f">{form.split('.')[0]}") if value is None else format(value, form)
