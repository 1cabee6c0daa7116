"""The items of an evaluated milestone: what each question gave, and which tasks form a row of a comparison.

Reads the items of a task from ``items-<task>.parquet``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hlatctl.report.item_file import batch_rows
from hlatctl.run import contract, files
from hlatctl.run.contract import OWN
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import HELD_OUT, headlines
from hlatctl.run.files import DAMAGED, open_regular, why
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState

_COLUMNS = ["item", "filter", "document", "prompt", "target", "choices", "answer", "metrics"]
_BEFORE, _AFTER = "items-", ".parquet"


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of one question under one filter, or of one program.

    Args:
        item: its number in the dataset, or the problem's id.
        asked: hashes of document, prompt and right answer, as lm-evaluation-harness makes them; empty for a program.
        metrics: value of each metric.
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
    return run.eval(milestone.milestone_tokens) / contract.folder(milestone.contract)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each task's items, by the task's name."""
    paths = folder.glob(f"{_BEFORE}*{_AFTER}")
    return dict(sorted((path.name[len(_BEFORE) : -len(_AFTER)], path) for path in paths))


def read_lines(path: Path, hint: str) -> list[Line]:
    """Return the lines of a task's file.

    Raises:
        EvaluationError: the file is damaged; it has this hint.
    """
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

    Raises:
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
    own = contract.read_record(run).groups
    grouped = {name: members for name, members in own.items() if all(task in tasks for task in members)}
    inside = {task for members in grouped.values() for task in members}
    grouped |= {task: [task] for task in tasks if task not in inside and not task.startswith(HELD_OUT)}
    return {name: grouped[name] for name in headlines(grouped)}


def means_over_tasks(run: RunPaths) -> set[tuple[str, str]]:
    """Return the groups and metrics whose score is the unweighted mean over tasks; of other groups, over all items."""
    figures = contract.read_record(run).numbered(OWN).figures
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
