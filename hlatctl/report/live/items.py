"""The items of a task on the live page, page by page: those of a milestone, and those that changed since another one.

A Parquet file is read twice: the first pass reads only the values of all items, the second stops at the page's last
item. So memory is that of one page and one number for each item.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hlatctl.report import items as item_file
from hlatctl.run.errors import ConfigError, suggest
from hlatctl.run.paths import RunPaths

DEFAULT_COUNT, MOST_COUNT = 10, 50
#: Longer texts are cut; a prompt with solved examples has some 10,000 characters.
MOST_CHARS = 40_000
#: Which items: all, by the value at the milestone, or those that have changed since the other milestone.
ALL, WRONG, RIGHT, GAINED, LOST = "all", "wrong", "right", "gained", "lost"
SHOWN = (ALL, WRONG, RIGHT, GAINED, LOST)

#: Item, filter, and the number of the row among those of both: a problem has several programs.
_Key = tuple[str, str, int]
_TEXTS = ("item", "filter", "prompt", "target", "answer", "result")


@dataclass(frozen=True, kw_only=True)
class ItemsRequest:
    """A request for items.

    Args:
        tokens: tokens of the milestone.
        since: tokens of the milestone to compare with; None: no comparison.
        shown: one of ``SHOWN``.
        offset, count: first item and number of items.
    """

    task: str
    tokens: int
    since: int | None = None
    shown: str = ALL
    offset: int = 0
    count: int = DEFAULT_COUNT


def files(run: RunPaths, milestones: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tasks with items of each milestone that has any, the newest first."""
    found = [(tokens, item_file.tasks_of(run, tokens)) for tokens in sorted(milestones, reverse=True)]
    return [{"tokens": tokens, "tasks": tasks} for tokens, tasks in found if tasks]


def page(run: RunPaths, request: ItemsRequest) -> dict[str, Any]:
    """Return the requested items of a task, and their number.

    Raises:
        ConfigError: there is no such task, or the request is invalid.
        EvaluationError: a file is damaged.
    """
    _check(request)
    path = item_file.file_of(run, request.tokens, request.task)
    metric, now = _values(path, run, item_file.first_metric(path, request.task))
    older = None if request.since is None else item_file.file_of(run, request.since, request.task)
    before = _values(older, run, metric)[1] if older else {}
    chosen = [key for key, value in now.items() if _is_wanted(request.shown, value, before.get(key))]
    wanted = chosen[request.offset : request.offset + request.count]
    items = _items(path, run, wanted, metric)
    earlier = _items(older, run, wanted, metric) if older else {}
    shown = [{**items[key], "before": earlier.get(key)} for key in wanted]
    return {"task": request.task, "metric": metric, "total": len(now), "matching": len(chosen), "items": shown}


def _check(request: ItemsRequest) -> None:
    if request.shown not in SHOWN:
        raise ConfigError(f"show={request.shown:.40}: no such choice", hint=suggest(request.shown, SHOWN))
    if request.shown in (GAINED, LOST) and request.since is None:
        raise ConfigError(f"show={request.shown}: needs a milestone to compare with", hint="since=TOKENS")
    if not 1 <= request.count <= MOST_COUNT:
        raise ConfigError(f"count={request.count}: must be 1 to {MOST_COUNT}", hint=f"count={DEFAULT_COUNT}")


def _is_wanted(shown: str, value: float, before: float | None) -> bool:
    is_right, was_right = value >= 1.0, None if before is None else before >= 1.0
    if shown in (GAINED, LOST):
        return was_right is not None and is_right != was_right and is_right == (shown == GAINED)
    return shown == ALL or is_right == (shown == RIGHT)


def _values(path: Path, run: RunPaths, first: str) -> tuple[str, dict[_Key, float]]:
    metric, found = "", {}
    for key, row in _keyed(item_file.rows(path, run, ("item", "filter", "metrics"))):
        values = dict(row["metrics"])
        metric = metric or item_file.deciding(values, first)
        if metric in values:
            found[key] = float(values[metric])
    return metric, found


def _items(path: Path, run: RunPaths, wanted: list[_Key], metric: str) -> dict[_Key, dict[str, Any]]:
    left = set(wanted)
    matching = ((key, row) for key, row in _keyed(item_file.rows(path, run)) if key in left)
    return {key: _item(row, metric) for key, row in islice(matching, len(left))}


def _keyed(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[_Key, dict[str, Any]]]:
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        name = (str(row["item"]), str(row["filter"]))
        yield (*name, seen[name]), row
        seen[name] += 1


def _item(row: dict[str, Any], metric: str) -> dict[str, Any]:
    texts = {name: row[name] for name in _TEXTS}
    return {
        **{name: text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…" for name, text in texts.items()},
        "value": dict(row["metrics"]).get(metric),
        "choices": [choice[:MOST_CHARS] for choice in row["choices"]],
        "loglikelihoods": list(row["loglikelihoods"]),
    }
