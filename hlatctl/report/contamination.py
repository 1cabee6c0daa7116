"""Evaluation items that are in the corpus of a run: how many, and the scores without them.

An item overlaps if at least one of its n-grams is in the corpus, which GPT-3's study calls potentially contaminated
(arXiv 2005.14165, section 4). Such a match can be a quotation, and finding no match doesn't prove that the item is
absent. PaLM's study (arXiv 2204.02311, section 8) counts items of which at least 70 % of the n-grams are found.

A milestone has one result for each scan (``trainer.data.overlap``), because scans can differ in items or documents. For
each task, the scan up to the latest milestone counts; of several such scans, the one that finished last.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlatctl.report import items
from hlatctl.report.items import TaskItems, read_items
from hlatctl.report.tabular import aligned
from hlatctl.run import files
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import HELD_OUT
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState, RunState
from hlatctl.units import count, printable

_RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Hit:
    """An item that overlaps.

    Args:
        ngrams, found: number of n-grams, and how many of them are in the corpus.
        example: the first n-gram found, in line ``row`` of ``file``.
    """

    ngrams: int
    found: int
    example: str
    file: str
    row: int


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """The scan's result for one task.

    Args:
        milestone_tokens: the documents up to this milestone were scanned.
        words: words per n-gram.
        items, short: number of items, and how many have too few words.
        overlapping: overlapping items by name.
    """

    milestone_tokens: int
    words: int
    items: int
    short: int
    overlapping: dict[str, Hit]


def newest(run: RunPaths, milestones: Iterable[int]) -> dict[str, Scanned]:
    """Return the newest known result of each task, by name. Damaged results count as missing."""
    found: dict[str, Scanned] = {}
    for tokens in sorted(milestones, reverse=True):
        for tasks in _results(run, tokens):
            found = tasks | found
    return found


def scanned(tasks: Mapping[str, Any], milestone_tokens: int) -> dict[str, Scanned]:
    """Return the tasks of one result; DAMAGED if it is damaged."""
    return {name: _scanned(task, milestone_tokens) for name, task in tasks.items()}


def _results(run: RunPaths, milestone_tokens: int) -> Iterator[dict[str, Scanned]]:
    """Yield the results of a milestone, the newest first."""
    folder = run.contamination(milestone_tokens)
    results: list[tuple[float, dict[str, Scanned]]] = []
    for path in sorted(folder.glob(f"*/{_RESULT}")):
        try:
            result = files.read_sealed_json(path)
            results.append((float(result["finished_unix_s"]), scanned(result["tasks"], milestone_tokens)))
        except (OSError, *DAMAGED):
            continue
    yield from (tasks for _, tasks in sorted(results, key=lambda result: -result[0]))


def _scanned(task: Mapping[str, Any], milestone_tokens: int) -> Scanned:
    return Scanned(
        milestone_tokens=milestone_tokens,
        words=int(task["words"]),
        items=int(task["items"]),
        short=int(task["short"]),
        overlapping={name: _hit(item) for name, item in task["overlapping"].items()},
    )


def _hit(item: Mapping[str, Any]) -> Hit:
    return Hit(
        ngrams=int(item["ngrams"]),
        found=int(item["found"]),
        example=str(item["example"]),
        file=str(item["file"]),
        row=int(item["row"]),
    )


#: An item with at least this share of its n-grams in the corpus is mostly in it (PaLM).
MOSTLY = 0.7
HEADER = (
    "task",
    "up to",
    "n-gram words",
    "items",
    "too short",
    "overlapping",
    "mostly",
    "metric",
    "all items",
    "without them",
)


@dataclass(frozen=True)
class Mean:
    """A mean over items, and its standard error; None for fewer than two."""

    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One task's overlap.

    Args:
        mostly: number of items with :data:`MOSTLY` of their n-grams in the corpus.
        metric: metric of the means; empty if the milestone has no items of the task.
        everything, clean: means over all items and over those that don't overlap.
        unscanned: number of items with a score that were not scanned.
    """

    task: str
    scanned: Scanned
    mostly: int
    metric: str = ""
    everything: Mean | None = None
    clean: Mean | None = None
    unscanned: int = 0


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """All tasks of a run, and what is not scanned: tasks, or ``TASK (N items)``."""

    rows: list[Overlap]
    unscanned: list[str]


def read_overlaps(run: RunPaths, state: RunState) -> Overlaps | None:
    """Return the results of the newest complete scans by task; None if there is no complete scan."""
    found = newest(run, state.milestones)
    if not found:
        return None
    scored = {
        tokens: items_of(run, state.milestones[tokens]) for tokens in {s.milestone_tokens for s in found.values()}
    }
    rows = [overlap(name, task, scored[task.milestone_tokens].get(name)) for name, task in sorted(found.items())]
    return Overlaps(rows=rows, unscanned=unscanned(run, state, rows))


def unscanned(run: RunPaths, state: RunState, rows: Sequence[Overlap]) -> list[str]:
    """Return what the newest milestone with items has and no row covers: tasks, or ``TASK (N items)``."""
    folders = [items.folder_of(run, milestone) for _, milestone in sorted(state.milestones.items(), reverse=True)]
    tasks = next(filter(None, map(items.files_of, folders)), {})
    known = {row.task: row.unscanned for row in rows}
    missing = {task: known.get(task) for task in tasks if not task.startswith(HELD_OUT)}
    return [f"{task} ({number:,} items)" if number else task for task, number in missing.items() if number != 0]


def in_corpus(run: RunPaths, milestone_tokens: int, task: str) -> dict[str, str]:
    """Return a description of each overlapping item of a task, by item; empty if the task is not scanned."""
    found = newest(run, [milestone_tokens])
    return {name: _in_words(hit) for name, hit in found[task].overlapping.items()} if task in found else {}


def lacks(run: RunPaths, milestone_tokens: int, task: str) -> bool:
    """Return whether the corpus up to a milestone was scanned, but not for this task."""
    found = newest(run, [milestone_tokens])
    return bool(found) and task not in found


def items_of(run: RunPaths, milestone: MilestoneState) -> dict[str, TaskItems]:
    """Return the items of a milestone; empty if it has none, or if a file is damaged."""
    try:
        return read_items(run, milestone)
    except EvaluationError:
        return {}


def overlap(task: str, scanned: Scanned, scored: TaskItems | None) -> Overlap:
    """Return a task with the means over its items; pure. The items are those at the scan's milestone; None: unknown."""
    found = scanned.overlapping
    values = {item.name: item.value for item in (scored.items or {}).values()} if scored else {}
    return Overlap(
        task=task,
        scanned=scanned,
        mostly=sum(hit.found >= MOSTLY * hit.ngrams for hit in found.values()),
        metric=scored.metric if scored and values else "",
        everything=_mean(values, ()),
        clean=_mean(values, found),
        unscanned=max(0, len(values) - scanned.items),
    )


def text(rows: Sequence[Overlap]) -> str:
    """Return a table for a terminal."""
    return printable("\n".join(aligned([HEADER, *map(cells, rows)], left=1))) + "\n"


def cells(row: Overlap) -> tuple[str, ...]:
    """Return a row of :data:`HEADER`."""
    scanned = row.scanned
    overlapping = len(scanned.overlapping)
    return (
        row.task,
        count(scanned.milestone_tokens),
        str(scanned.words),
        f"{scanned.items:,}",
        f"{scanned.short:,}",
        f"{overlapping:,} ({overlapping / max(1, scanned.items):.1%})",
        f"{row.mostly:,}",
        row.metric or "–",
        _mean_text(row.everything),
        _mean_text(row.clean),
    )


def _in_words(hit: Hit) -> str:
    return f"{hit.found} of {hit.ngrams} n-grams, such as {hit.example!r} ({hit.file}:{hit.row})"


def _mean(values: Mapping[str, float], without: Collection[str]) -> Mean | None:
    kept = [value for name, value in values.items() if name not in without]
    if not kept:
        return None
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((value - mean) ** 2 for value in kept) / max(1, len(kept) - 1)
    return Mean(mean, math.sqrt(variance / len(kept)) if len(kept) > 1 else None, len(kept))


def _mean_text(mean: Mean | None) -> str:
    if mean is None:
        return "–"
    return f"{mean.value:.3f}" + ("" if mean.stderr is None else f" ± {mean.stderr:.3f}")
