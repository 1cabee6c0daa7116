"""Figures and items of another evaluator's results file: checked, bounded, and named like a run's scores.

Items are written in the columns that evaluations write.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlatctl.run.errors import DataError
from hlatctl.run.evaluations import BITS_PER_BYTE, HELD_OUT, bits_of, schema
from hlatctl.run.files import DAMAGED, open_regular, parse_json, why
from hlatctl.units import one_line, size

#: Maximum figures per file; MMLU, BBH and a dozen other tasks have about 200.
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
#: Suffixes of standard errors and, in this project's exports, of scores of guessing.
STDERR, CHANCE = "_stderr", "_chance"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a file. Everything but its metric and its finite value can be unknown (None).

    Args:
        n: number of evaluated items.
        items: number of items in the dataset.
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
    """The content of a file. Texts have one line and at most 200 characters; empty if unknown.

    Args:
        form: ``lm_eval``, ``lighteval`` or ``olmes``.
        limit: items per task, or a fraction of them; None: not known, or all.
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
            metrics: metric, variant (such as a filter of the answer), value and standard error; others than finite
                numbers are left out.
            known: other fields of ``Figure``.

        Raises:
            ValueError: two tasks have the same name, or there are too many figures.
            DataError: a score or its standard error is out of range.
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
    """Check that fractions of an item are between 0 and 1, else DataError: evaluators may use other units for items."""
    for metric, value in metrics.items():
        if _FRACTION.fullmatch(metric) and not 0 <= value <= 1:
            raise _out_of_range("an item", metric, value, 0.0, 1.0)


def _out_of_range(name: str, metric: str, value: float | None, low: float, high: float) -> DataError:
    rule = f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
    hint = "correct the file; accuracies are fractions, such as 0.45 for 45 %"
    return DataError(f"{name}: {metric}={value:g}: must be {rule}", hint=hint)


def _title(task: str, metric: str, variant: str, first: str) -> str:
    if not first:
        return task
    if metric == BITS_PER_BYTE:
        return bits_of(task)
    return f"{task}_{_short(variant if variant and metric == first else metric)}"


def _short(name: str) -> str:
    """Return the cleaned name of a metric or variant. lighteval appends all settings to some names."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return clean_name(name if len(name) <= _MOST_METRIC_CHARS else f"{name[:_MOST_METRIC_CHARS]}_{digest}")


def pairs(metrics: Mapping[str, Any], split: str) -> list[tuple[str, str, Any, Any]]:
    """Return the metrics of a mapping such as ``{"acc": 0.5, "acc_stderr": 0.1}`` for :meth:`Figures.add`.

    Args:
        metrics: metrics by name; keys that end in ``_stderr`` are standard errors.
        split: separator of a metric and its variant; ``acc_stderr`` has the standard error of ``acc``, and with a
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

    ValueError: the cleaned name is empty or too long.
    """
    cleaned = re.sub(r"[^A-Za-z0-9]+", "_", name.replace("@", "_at_")).strip("_")
    if not cleaned or len(cleaned) > _MOST_NAME_CHARS:
        raise ValueError(f"a name has {len(cleaned)} letters and digits, must have 1 to {_MOST_NAME_CHARS}")
    return cleaned


def finite(value: Any) -> float | None:
    """Return a finite number as float; None for anything else, such as ``N/A``."""
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def whole(value: Any) -> int | None:
    """Return a whole number, also from a float such as 400.0; None for anything else."""
    is_whole = type(value) in (int, float) and 0 <= value < 1 << 53 and value == int(value)
    return int(value) if is_whole else None


def some(value: Any) -> int | float | None:
    """Return a limit of items: a whole number, or a fraction above 0 and below 1; None for anything else."""
    number = finite(value)
    return number if number is not None and 0 < number < 1 else whole(value)


def text(value: Any) -> str:
    """Return a text or number as one bounded line; empty for anything else."""
    return one_line(str(value))[:_MOST_TEXT_CHARS] if type(value) in (str, int, float) else ""


def mapping(value: Any) -> dict[str, Any]:
    """Return an object; empty for anything else."""
    return value if isinstance(value, dict) else {}


#: A task has at most some 100,000 items. Samples of MMLU with five solved examples have about 100 MiB.
MOST_ITEMS, MOST_FILE_BYTES = 1_000_000, 1 << 30
#: Maximum size of a line or an item, which has a document, its prompt and the answers.
_MOST_LINE_BYTES = 16 << 20
#: Maximum items in memory.
_BATCH_ROWS, _BATCH_CHARS = 256, 64 << 20

ItemRow = dict[str, Any]
_TEXTS = ("document", "prompt", "target", "answer")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The file with the items of a task, and how its rows are read."""

    path: Path
    rows: Callable[[], Iterator[ItemRow]]


def write(folder: Path, found: Mapping[str, Found]) -> dict[str, Path]:
    """Write the items of each task to ``items-<task>.parquet``, with at most 256 of them in memory.

    DataError: a file is damaged or too large.
    """
    return {task: _write(folder / f"items-{task}.parquet", task, each) for task, each in found.items()}


def count(path: Path) -> int:
    """Return the number of rows of a file that :func:`write` wrote."""
    from pyarrow import parquet

    return int(parquet.read_metadata(path).num_rows)


def _write(path: Path, task: str, found: Found) -> Path:
    import pyarrow
    from pyarrow import parquet

    own = schema(pyarrow)
    try:
        with parquet.ParquetWriter(path, own, compression="zstd") as file:
            for batch in _batches(found.rows()):
                file.write_table(pyarrow.Table.from_pylist([{"task": task, **row} for row in batch], schema=own))
    except (OSError, pyarrow.ArrowException, *DAMAGED) as error:
        raise DataError(
            f"{found.path}: can't be imported ({one_line(why(error))})", hint="move it away to import the scores alone"
        ) from None
    except DataError as error:
        raise DataError(f"{found.path}: {error.message}", hint=error.hint) from None
    return path


def _batches(rows: Iterator[ItemRow]) -> Iterator[list[ItemRow]]:
    """Yield the rows, several at a time; ValueError if there are too many, or they have too much text."""
    batch: list[ItemRow] = []
    here = read = 0
    for number, each in enumerate(rows):
        chars = sum(len(each[name]) for name in _TEXTS) + sum(map(len, each["choices"]))
        here, read = here + chars, read + chars
        if chars > _MOST_LINE_BYTES:
            raise ValueError(f"item {number + 1} has more than {size(_MOST_LINE_BYTES)} of text")
        if number == MOST_ITEMS or read > 4 * MOST_FILE_BYTES:
            raise ValueError(f"has more than {MOST_ITEMS:,} items, or more than {size(4 * MOST_FILE_BYTES)} of text")
        batch.append(each)
        if len(batch) == _BATCH_ROWS or here > _BATCH_CHARS:
            yield batch
            batch, here = [], 0
    if batch:
        yield batch


def row(
    *,
    item: Any,
    document: Any,
    prompt: str,
    target: Any,
    metrics: Mapping[str, Any],
    choices: Sequence[str] = (),
    loglikelihoods: Sequence[Any] = (),
    answer: str = "",
    answer_filter: Any = "none",
) -> ItemRow:
    """Return an item in the columns of a file of items.

    Args:
        item: number or name of the item.
        document: the dataset's record; None: unknown, so the item can't be paired.
        loglikelihoods: numbers, or numbers as text.
        metrics: only finite numbers are kept.
    """
    figures = {text(n): number for n, value in metrics.items() if (number := _value(value)) is not None}
    check_item(figures)
    values = [_number(value) for value in loglikelihoods]
    is_ranked = bool(choices) and len(values) == len(choices) and None not in values
    return {
        "item": text(item),
        "filter": text(answer_filter),
        "document": "" if document is None else json.dumps(document, ensure_ascii=False),
        "prompt": prompt,
        "target": str(target),
        "choices": list(choices) if is_ranked else [],
        "loglikelihoods": values if is_ranked else [],
        "answer": "" if is_ranked else answer,
        "metrics": list(figures.items()),
        "result": "",
    }


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; ValueError if it is too large, or a line is no JSON object."""
    read = 0
    with open(path, "rb", opener=open_regular) as file:
        while line := file.readline(_MOST_LINE_BYTES + 1):
            read += len(line)
            if len(line) > _MOST_LINE_BYTES or read > MOST_FILE_BYTES:
                raise ValueError(
                    f"has more than {size(MOST_FILE_BYTES)}, or a line of more than {size(_MOST_LINE_BYTES)}"
                )
            value = parse_json(line, any_number=True)
            if not isinstance(value, dict):
                raise ValueError(f"a line holds {type(value).__name__}, expected an object")
            yield value


def is_file(path: Path) -> bool:
    """Return whether a file exists; accepts names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _value(value: Any) -> float | None:
    """Return the value of a metric. Evaluators also write true and false for right and wrong items."""
    return float(value) if isinstance(value, bool) else finite(value)


def _number(value: Any) -> float | None:
    if not isinstance(value, str):
        return finite(value)
    try:
        return finite(float(value))
    except ValueError:
        return None
