"""The items of imported scores: checked, bounded, and written in the columns that evaluations write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.report.exchange.imported import check_item, finite, text
from hlatctl.run.errors import DataError
from hlatctl.run.item_columns import schema
from hlatctl.run.reading import DAMAGED, open_regular, parse_json, why
from hlatctl.units import one_line, size

#: A task has at most some 100,000 items. Samples of MMLU with five solved examples have about 100 MiB.
MOST_ITEMS, MOST_FILE_BYTES = 1_000_000, 1 << 30
#: A line, or an item, has a document, its prompt and the answers.
_MOST_LINE_BYTES = 16 << 20
#: Items in memory.
_BATCH_ROWS, _BATCH_CHARS = 256, 64 << 20

Row = dict[str, Any]
_TEXTS = ("document", "prompt", "target", "answer")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The file with the items of a task, and how its rows are read."""

    path: Path
    rows: Callable[[], Iterator[Row]]


def write(folder: Path, found: Mapping[str, Found]) -> dict[str, Path]:
    """Write the items of each task to ``items-<task>.parquet``, with at most 256 of them in memory.

    Raises:
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


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield the rows, several at a time.

    Raises:
        ValueError: there are too many, or they have too much text.
    """
    batch: list[Row] = []
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
) -> Row:
    """Return an item in the columns of a file of items.

    Args:
        item: its number or name.
        document: the dataset's record; None: not known, so that the item can't be paired.
        prompt, target, choices, loglikelihoods, answer, answer_filter: as the columns; log-likelihoods can be texts.
        metrics: only finite numbers are kept.

    Raises:
        DataError: a metric can't have its value.
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
    """Yield the objects of a file of JSON lines.

    Raises:
        OSError: it can't be read.
        ValueError: it is too large, or a line is no object.
    """
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
    """Return whether there is such a file; also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _value(value: Any) -> float | None:
    """Return the value of a metric; evaluators write whether an item is right as true and false, too."""
    return float(value) if isinstance(value, bool) else finite(value)


def _number(value: Any) -> float | None:
    if not isinstance(value, str):
        return finite(value)
    try:
        return finite(float(value))
    except ValueError:
        return None
