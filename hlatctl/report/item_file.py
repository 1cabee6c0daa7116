"""Reads and prints the items of one task, with prompts and answers, from ``items-<task>.parquet``."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import contract as contract_record
from hlatctl.run.errors import ConfigError, EvaluationError, suggest
from hlatctl.run.evaluations import LOWER_IS_BETTER
from hlatctl.run.files import DAMAGED, open_regular, read_json, why
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from hlatctl.units import printable, size

#: The end of a prompt is the question; solved examples precede it.
_PROMPT_CHARS, _ANSWER_CHARS = 1_200, 1_200
#: In a column and a group of rows: an item has some ten choices, and as many solved examples with theirs.
_MOST_VALUES = 10_000_000
#: Of a column in a group of rows, unpacked. The prompts of a task's items have less than 1 GiB.
_MOST_COLUMN_BYTES = 4 << 30
#: Rows in memory: so many, or fewer if one text can be as large as a whole column.
_MOST_BATCH_ROWS, _MOST_BATCH_BYTES = 256, 256 << 20


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One item. ``value`` is that of ``metric``; the other fields are columns (``hlatctl.run.evaluations``).

    ``corpus`` describes its overlap with the training corpus (``hlatctl.report.contamination``); empty if unknown.
    """

    task: str
    item: str
    metric: str
    value: float | None
    prompt: str
    target: str
    choices: list[str]
    loglikelihoods: list[float]
    answer: str
    result: str
    corpus: str = ""


def read(
    run: RunPaths,
    milestone: MilestoneState,
    task: str,
    *,
    right: bool | None,
    limit: int,
    metric: str = "",
    corpus: Mapping[str, str] | None = None,
) -> list[Shown]:
    """Return items of a task in their order.

    Args:
        right: select right or wrong items; None: all. An item is right if its metric is at least 1.
        limit: maximum number of items.
        metric: metric to show; empty: the one that says whether an item is right (:func:`deciding`).
        corpus: each item's overlap with the training corpus (``contamination.in_corpus``); None: unknown.

    Raises:
        ConfigError: the milestone has no such task, or the task no such metric.
        EvaluationError: the file is damaged.
    """
    path = file_of(run, milestone.milestone_tokens, task, milestone.contract)
    found: list[Shown] = []
    first = first_metric(path, task)
    for row in rows(path, run):
        metrics = dict(row["metrics"])
        chosen = metric or deciding(metrics, first)
        if metric and metric not in metrics:
            raise ConfigError(f"--metric={metric}: {task} has no such metric", hint=suggest(metric, sorted(metrics)))
        shown = _shown(row, chosen, metrics.get(chosen), corpus or {})
        if right is None or (shown.value is not None and (shown.value >= 1.0) == right):
            found.append(shown)
        if len(found) == limit:
            break
    return found


def text(items: Sequence[Shown]) -> str:
    """Return items for a terminal: the end of the prompt, choices with their log-likelihoods, answer and target."""
    return printable("\n".join("\n".join(_lines(item)) for item in items))


def tasks_of(run: RunPaths, milestone_tokens: int, contract: str = "") -> list[str]:
    """Return the names of the tasks of a milestone that have a file of items, sorted."""
    found = _folder(run, milestone_tokens, contract).glob("items-*.parquet")
    return sorted(each.name.removeprefix("items-").removesuffix(".parquet") for each in found)


def _folder(run: RunPaths, milestone_tokens: int, contract: str) -> Path:
    return run.eval(milestone_tokens) / contract_record.folder(contract)


def file_of(run: RunPaths, milestone_tokens: int, task: str, contract: str = "") -> Path:
    """Return the file of a task's items.

    Raises:
        ConfigError: the milestone has no such task.
    """
    known = tasks_of(run, milestone_tokens, contract)
    if task not in known:
        hint = suggest(task, known) if known else "simulations and imports without items have none"
        raise ConfigError(f"--task={task:.80}: the milestone has no items of such a task", hint=hint)
    return _folder(run, milestone_tokens, contract) / f"items-{task}.parquet"


def rows(path: Path, run: RunPaths, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of items, at most 256 in memory.

    Args:
        columns: columns to read; None: all.

    Raises:
        EvaluationError: the file is damaged.
    """
    from pyarrow import ArrowException, parquet

    try:
        with open(path, "rb", opener=open_regular) as opened, parquet.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=batch_rows(file), columns=columns):
                yield from batch.to_pylist()
    except (OSError, ArrowException, *DAMAGED) as error:
        raise EvaluationError(
            f"{path}: can't be read ({why(error)})", hint=f"move it away, then `hlatctl eval {run.run_id}`"
        ) from None


def batch_rows(file: Any) -> int:
    """Return how many rows of a Parquet file can be read at once: a small file can say a large text for each row.

    Args:
        file: a ``ParquetFile``.

    Raises:
        ValueError: a column is too large.
    """
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    values = max((chunk.num_values for chunk in chunks), default=0)
    if values > _MOST_VALUES:
        raise ValueError(f"has a column of {values:,} values, more than {_MOST_VALUES:,}")
    largest = max((chunk.total_uncompressed_size for chunk in chunks), default=1)
    if largest > _MOST_COLUMN_BYTES:
        raise ValueError(f"has a column of {size(largest)}, more than {size(_MOST_COLUMN_BYTES)}")
    return max(1, min(_MOST_BATCH_ROWS, _MOST_BATCH_BYTES // max(1, largest)))


def first_metric(path: Path, task: str) -> str:
    """Return the metric of a task's first score, from the file next to its items; empty if unknown."""
    try:
        return str(read_json(path.parent / "tasks" / f"{task}.json")["scores"][task]["metric"])
    except (OSError, *DAMAGED):
        return ""


def deciding(metrics: Collection[str], first: str) -> str:
    """Return the metric that says whether an item is right: the first score's, or the first that is not a loss."""
    better_high = [name for name in metrics if name not in LOWER_IS_BETTER]
    return first if first in better_high else next(iter([*better_high, *metrics]), "")


def _shown(row: dict[str, Any], metric: str, value: float | None, corpus: Mapping[str, str]) -> Shown:
    names = ("task", "item", "prompt", "target", "choices", "loglikelihoods", "answer", "result")
    about = corpus.get(row["item"], "")
    return Shown(metric=metric, value=value, corpus=about, **{name: row[name] for name in names})


def _lines(item: Shown) -> Iterator[str]:
    value = "" if item.value is None else f": {item.metric} {item.value:g}"
    yield f"== {item.task} {item.item}{value}"
    if item.prompt:
        yield textwrap.indent(_end(item.prompt, _PROMPT_CHARS), "  ")
    best = max(item.loglikelihoods, default=0.0)
    for choice, likelihood in zip(item.choices, item.loglikelihoods, strict=True):
        yield f"  {'>' if likelihood == best else ' '} {likelihood:9.3f} {choice.strip()}"
    if item.answer:
        yield f"  answer: {_begin(item.answer.strip(), _ANSWER_CHARS)}"
    if item.target:
        yield f"  right:  {item.target}"
    if item.result:
        yield f"  result: {item.result}"
    if item.corpus:
        yield f"  corpus: {item.corpus}"


def _end(words: str, chars: int) -> str:
    return words if len(words) <= chars else f"…{words[-chars:]}"


def _begin(words: str, chars: int) -> str:
    return words if len(words) <= chars else f"{words[:chars]}…"
