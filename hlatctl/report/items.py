"""The items of an evaluated milestone: what each question gave, which tasks form a row of a comparison, and the print.

Reads the items of a task from ``items-<task>.parquet``.
"""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hlatctl.run import contract as contract_record
from hlatctl.run import files
from hlatctl.run.contract import OWN
from hlatctl.run.errors import ConfigError, EvaluationError, suggest
from hlatctl.run.evaluations import HELD_OUT, LOWER_IS_BETTER, headlines
from hlatctl.run.files import DAMAGED, open_regular, read_json, why
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from hlatctl.units import printable, size

_COLUMNS = ["item", "filter", "document", "prompt", "target", "choices", "answer", "metrics"]
_BEFORE, _AFTER = "items-", ".parquet"


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of one question under one filter, or of one program.

    Args:
        item: its number in the dataset, or the problem's id.
        asked: hashes of document, prompt and right answer, as lm-evaluation-harness makes them; empty for a program.
        choices: answers that were ranked; 0 if the model wrote its answer.
    """

    item: str
    filter: str
    asked: str
    target: str
    answer: str
    choices: int
    metrics: dict[str, float]


def folder_of(run: RunPaths, milestone: MilestoneState) -> Path:
    """Return the folder of the results of a milestone that its state shows."""
    return run.eval(milestone.milestone_tokens) / contract_record.folder(milestone.contract)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each task's items, by the task's name."""
    paths = folder.glob(f"{_BEFORE}*{_AFTER}")
    return dict(sorted((path.name[len(_BEFORE) : -len(_AFTER)], path) for path in paths))


def read_lines(path: Path, hint: str) -> list[Line]:
    """Return the lines of a task's file; EvaluationError with this hint if it is damaged."""
    try:
        return list(_lines(path))
    except (OSError, *DAMAGED) as error:
        raise EvaluationError(f"{path}: can't be read ({why(error)})", hint=hint) from None


def _lines(path: Path) -> Iterator[Line]:
    from pyarrow import ArrowException, parquet

    try:
        with open(path, "rb", opener=open_regular) as opened, parquet.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=batch_rows(file), columns=_COLUMNS):
                yield from map(_of_row, batch.to_pylist())
    except ArrowException as error:
        raise ValueError(str(error)) from None


def _of_row(row: dict[str, Any]) -> Line:
    return Line(
        item=row["item"],
        filter=row["filter"],
        asked=_asked(row) if row["document"] else "",
        target=row["target"],
        answer=row["answer"],
        choices=len(row["choices"]),
        metrics=dict(row["metrics"]),
    )


def _asked(row: dict[str, Any]) -> str:
    document = json.dumps(json.loads(row["document"]), indent=2, ensure_ascii=False)
    return " ".join(hashlib.sha256(text.encode()).hexdigest() for text in (document, row["prompt"], row["target"]))


#: Of a code task: the metric that one program gives.
_PASSED = "passed"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question and its result.

    Args:
        name: the item's number in its dataset, or the problem's id.
        document: hashes of the document and the right answer, by which items are paired; empty if unknown.
        asked: the same with the prompt.
        value: value of the metric; in a code task, the mean over the item's programs.
        target, answer: the right answer and the model's; the answer is empty where choices are ranked.
        choices: number of ranked answers; 0 if the model wrote its answer.
    """

    task: str
    name: str
    document: str
    asked: str
    value: float
    target: str
    answer: str
    choices: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskItems:
    """The items of a score by key, and the metric; ``items`` is None if a value is not finite."""

    metric: str
    items: dict[str, Item] | None


def read_items(run: RunPaths, milestone: MilestoneState) -> dict[str, TaskItems]:
    """Return the items of each task of a milestone, by the task's name, under the contracts that its state shows.

    EvaluationError: a file is damaged.
    """
    folder = folder_of(run, milestone)
    hint = f"`hlatctl eval {run.run_id}` after you move it away"
    found = {}
    for task, path in files_of(folder).items():
        lines = read_lines(path, hint)
        try:
            found[task] = _of_task(task, lines, _metric(folder, task))
        except (OSError, *DAMAGED) as error:
            raise EvaluationError(f"{path}: can't be read ({why(error)})", hint=hint) from None
    return found


def groups(run: RunPaths, tasks: Mapping[str, TaskItems]) -> dict[str, list[str]]:
    """Return the tasks of each headline: those of an outermost group under its name, the others alone.

    A group with a missing task is excluded, because its score would mean something else.
    """
    own = contract_record.read_record(run).groups
    grouped = {name: members for name, members in own.items() if all(task in tasks for task in members)}
    inside = {task for members in grouped.values() for task in members}
    grouped |= {task: [task] for task in tasks if task not in inside and not task.startswith(HELD_OUT)}
    return {name: grouped[name] for name in headlines(grouped)}


def means_over_tasks(run: RunPaths) -> set[tuple[str, str]]:
    """Return the groups and metrics whose score is the unweighted mean over tasks; of other groups, over all items."""
    figures = contract_record.read_record(run).numbered(OWN).figures
    return {
        (name, str(entry["metric"]))
        for name, figure in figures.items()
        for entry in figure.get("aggregate", ())
        if not entry.get("weight_by_size", True)
    }


def _metric(folder: Path, task: str) -> str:
    """Return the metric of a task's first score; empty for a code task, whose score is computed from its programs."""
    scores = files.read_json(folder / "tasks" / f"{task}.json")["scores"]
    return str(scores[task]["metric"]) if task in scores else ""


def _of_task(task: str, lines: list[Line], metric: str) -> TaskItems:
    if lines and _PASSED in lines[0].metrics:
        return TaskItems(metric=metric or _PASSED, items=_programs(task, lines))
    metric = metric or next((name for line in lines for name in line.metrics), "")
    counted = [line for line in lines if metric in line.metrics]
    if lines and not counted:  # files of items have only metrics that are numbers
        return TaskItems(metric=metric, items=None)
    chosen = [line for line in counted if line.filter == counted[0].filter]
    values = [line.metrics[metric] for line in chosen]
    if not all(map(math.isfinite, values)):
        return TaskItems(metric=metric, items=None)
    items = {line.item: _item(task, line, line.metrics[metric]) for line in chosen}
    return TaskItems(metric=metric, items=items)


def _programs(task: str, lines: list[Line]) -> dict[str, Item]:
    by_problem: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_problem[line.item].append(line)
    return {
        problem: replace(  # a program has no document, and a problem's name is the benchmark's own
            _item(task, tried[0], sum(bool(line.metrics[_PASSED]) for line in tried) / len(tried)), document=problem
        )
        for problem, tried in by_problem.items()
    }


def _item(task: str, line: Line, value: float) -> Item:
    return Item(
        task=task,
        name=line.item,
        document=" ".join(line.asked.split()[::2]),
        asked=line.asked,
        value=value,
        target=line.target,
        answer=line.answer,
        choices=line.choices,
    )


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
        metric: metric to show; empty: the one that says whether an item is right (:func:`deciding`).
        corpus: each item's overlap with the training corpus (``contamination.in_corpus``); None: unknown.
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
    return printable("\n".join("\n".join(_text_lines(item)) for item in items))


def tasks_of(run: RunPaths, milestone_tokens: int, contract: str = "") -> list[str]:
    """Return the names of the tasks of a milestone that have a file of items, sorted."""
    found = _folder(run, milestone_tokens, contract).glob("items-*.parquet")
    return sorted(each.name.removeprefix("items-").removesuffix(".parquet") for each in found)


def _folder(run: RunPaths, milestone_tokens: int, contract: str) -> Path:
    return run.eval(milestone_tokens) / contract_record.folder(contract)


def file_of(run: RunPaths, milestone_tokens: int, task: str, contract: str = "") -> Path:
    """Return the file of a task's items; ConfigError if the milestone has no such task."""
    known = tasks_of(run, milestone_tokens, contract)
    if task not in known:
        hint = suggest(task, known) if known else "simulations and imports without items have none"
        raise ConfigError(f"--task={task:.80}: the milestone has no items of such a task", hint=hint)
    return _folder(run, milestone_tokens, contract) / f"items-{task}.parquet"


def rows(path: Path, run: RunPaths, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of items, at most 256 in memory; EvaluationError if the file is damaged."""
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
    """Return how many rows of a ``ParquetFile`` can be read at once: a small file can say a large text for each row.

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


def _text_lines(item: Shown) -> Iterator[str]:
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
