"""Figures of a results file of others: checked, bounded, and named as the scores of a run are."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hlatctl.run.errors import DataError
from hlatctl.run.scores import BITS_PER_BYTE, HELD_OUT, bits_of
from hlatctl.units import one_line

#: A file has at most so many figures; MMLU, BBH and a dozen other tasks have about 200.
MOST_FIGURES = 20_000
#: Metrics whose scores have a range, by the whole name. Others can be any number. Tasks disagree on whether F1 and the
#: metrics of translations and summaries are fractions or percentages.
_FRACTION = re.compile(
    r"(.*_)?acc(uracy)?|acc_(norm|bytes|raw|uncond|per_)\w*|(.*_)?(exact|extractive)_match|q?em|mc[12]|pass(@|_at_)\w+"
)
_RANGES = (
    (_FRACTION, 0.0, 1.0),
    (re.compile(r"f1|bleu|chrf|rouge\w?"), 0.0, 100.0),
    (re.compile(r"mcc"), -1.0, 1.0),
    (re.compile(r"(word_|byte_)?perplexity"), 1.0, math.inf),
    (re.compile(r"bits_per_byte|loss_nats_per_token"), 0.0, math.inf),
)
_ROUNDING = 1e-6
_MOST_NAME_CHARS, _MOST_METRIC_CHARS, _MOST_TEXT_CHARS = 120, 60, 200
#: Ends of the names of standard errors and, in our own exports, of scores of guessing.
STDERR, CHANCE = "_stderr", "_chance"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a file. Everything but its metric and its finite value can be unknown (None).

    Args:
        n: items that were evaluated.
        items: all items of the dataset.
        shots: solved examples before each question.
        version: of the task's definition.
    """

    metric: str
    value: float
    stderr: float | None = None
    n: int | None = None
    items: int | None = None
    shots: int | None = None
    version: str | None = None


@dataclass(kw_only=True)
class Figures:
    """What a file has. Texts are one line and at most 200 characters; empty if unknown.

    Args:
        form: ``lm_eval``, ``lighteval`` or ``olmes``.
        version: of the evaluator.
        model, date: as the file says.
        limit: items per task, or a fraction of them; None: not known, or all.
        figures: by the name of the score.
    """

    form: str
    version: str = ""
    model: str = ""
    date: str = ""
    limit: int | float | None = None
    figures: dict[str, Figure] = field(default_factory=dict)

    def add(self, task: str, metrics: list[tuple[str, str, Any, Any]], **known: Any) -> None:
        """Add the figures of a task: the first under its name, the others with their metric or variant appended.

        Args:
            task: its name in the file.
            metrics: metric, variant (such as a filter of the answer), value and standard error; others than finite
                numbers are left out.
            known: other fields of ``Figure``.

        Raises:
            ValueError: two tasks have the same name, or there are too many figures.
            DataError: a score or its standard error can't have its value.
        """
        name = clean_name(task)
        if name.startswith(HELD_OUT):
            return  # a name that means a run's own held-out text
        if name in self.figures:
            raise ValueError(f"two results have the name {name}")
        first = ""
        for metric, variant, value, stderr in metrics:
            number = finite(value)
            if number is None:
                continue
            title = _title(name, metric, variant, first)
            first = first or metric
            figure = Figure(metric=text(metric), value=number, stderr=finite(stderr), **known)
            _check(title, figure)
            self.figures.setdefault(title, figure)
        if len(self.figures) > MOST_FIGURES:
            raise ValueError(f"has more than {MOST_FIGURES:,} figures")


def _check(name: str, figure: Figure) -> None:
    ranges = ((low, high) for of, low, high in _RANGES if of.fullmatch(figure.metric))
    low, high = next(ranges, (-math.inf, math.inf))
    if not low - _ROUNDING <= figure.value <= high + _ROUNDING:
        raise _out_of_range(name, figure.metric, figure.value, low, high)
    if (figure.stderr or 0.0) < 0.0:
        raise _out_of_range(name, f"{figure.metric}{STDERR}", figure.stderr, 0.0, math.inf)


def check_item(metrics: Mapping[str, float]) -> None:
    """Check the metrics of one item. Evaluators write some metrics of an item in other units than its task's score.

    Raises:
        DataError: a fraction is not one.
    """
    for metric, value in metrics.items():
        if _FRACTION.fullmatch(metric) and not 0 <= value <= 1:
            raise _out_of_range("an item", metric, value, 0.0, 1.0)


def _out_of_range(name: str, metric: str, value: float | None, low: float, high: float) -> DataError:
    rule = f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
    hint = "correct the file; accuracies are fractions, such as 0.45 for 45 %"
    return DataError(f"{name}: {metric}={value:g}: must be {rule}", hint=hint)


def _title(task: str, metric: str, variant: str, first: str) -> str:
    """Return the name of a score; ``first`` is the task's first metric, empty for this one."""
    if not first:
        return task
    if metric == BITS_PER_BYTE:
        return bits_of(task)
    return f"{task}_{_short(variant if variant and metric == first else metric)}"


def _short(name: str) -> str:
    """Return the cleaned name of a metric or variant; lighteval names some after all their settings."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return clean_name(name if len(name) <= _MOST_METRIC_CHARS else f"{name[:_MOST_METRIC_CHARS]}_{digest}")


def pairs(metrics: Mapping[str, Any], split: str) -> list[tuple[str, str, Any, Any]]:
    """Return the metrics of a mapping such as ``{"acc": 0.5, "acc_stderr": 0.1}`` for :meth:`Figures.add`.

    Args:
        metrics: by name; keys that end in ``_stderr`` are standard errors.
        split: what separates a metric from its variant; ``acc_stderr`` has the standard error of ``acc``, and with a
            comma ``acc_stderr,none`` that of ``acc,none``.
    """
    found = []
    for key, value in metrics.items():
        metric, mark, variant = key.partition(split)
        if metric.endswith((STDERR, CHANCE)) or key.endswith((STDERR, CHANCE)):
            continue
        stderr = metrics.get(f"{metric}{STDERR}{mark}{variant}", metrics.get(f"{key}{STDERR}"))
        found.append((metric, variant, value, stderr))
    return found


def clean_name(name: str) -> str:
    """Return a name of letters, digits and ``_``; ``pass@10`` becomes ``pass_at_10``.

    Raises:
        ValueError: nothing is left of it, or it is too long.
    """
    cleaned = re.sub(r"[^A-Za-z0-9]+", "_", name.replace("@", "_at_")).strip("_")
    if not cleaned or len(cleaned) > _MOST_NAME_CHARS:
        raise ValueError(f"a name has {len(cleaned)} letters and digits, must have 1 to {_MOST_NAME_CHARS}")
    return cleaned


def finite(value: Any) -> float | None:
    """Return a finite number as float; None for anything else, as ``N/A``."""
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def whole(value: Any) -> int | None:
    """Return a number of things, also from a float such as 400.0; None for anything else."""
    is_whole = type(value) in (int, float) and 0 <= value < 1 << 53 and value == int(value)
    return int(value) if is_whole else None


def some(value: Any) -> int | float | None:
    """Return a limit of items: a whole number, or a fraction above 0 and below 1; None for anything else."""
    number = finite(value)
    return number if number is not None and 0 < number < 1 else whole(value)


def text(value: Any) -> str:
    """Return a text as one bounded line; empty for anything else than texts and numbers."""
    return one_line(str(value))[:_MOST_TEXT_CHARS] if type(value) in (str, int, float) else ""


def mapping(value: Any) -> dict[str, Any]:
    """Return an object; empty for anything else."""
    return value if isinstance(value, dict) else {}
