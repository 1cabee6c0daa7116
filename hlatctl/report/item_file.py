"""The items of one task with their prompts and answers, from ``items-<task>.parquet``, which an evaluation writes."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import contract as contract_record
from hlatctl.run.errors import ConfigError, EvaluationError, suggest
from hlatctl.run.evaluations import LOWER_IS_BETTER
from hlatctl.run.files import DAMAGED, read_json, why
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from hlatctl.units import printable

#: The end of a prompt is the question; solved examples precede it.
_PROMPT_CHARS, _ANSWER_CHARS = 1_200, 1_200


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One item. ``value`` is that of ``metric``; the other fields are columns (``hlatctl.run.evaluations``).

    ``corpus`` says what of it is in the training corpus (``hlatctl.report.contamination``); empty if nothing is known.
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
        right: only right or only wrong items; None: all. An item is right if its metric is at least 1.
        limit: at most so many.
        metric: empty: the one that says whether an item is right (:func:`deciding`).
        corpus: what of each item is in the training corpus (``contamination.in_corpus``); None: unknown.

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
        path, run: the file, and its run.
        columns: to read; None: all.

    Raises:
        EvaluationError: the file is damaged.
    """
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except (OSError, ArrowException, *DAMAGED) as error:
        raise EvaluationError(
            f"{path}: can't be read ({why(error)})", hint=f"move it away, then `hlatctl eval {run.run_id}`"
        ) from None


def first_metric(path: Path, task: str) -> str:
    """Return the metric of a task's first score, which is beside its file of items; empty if it is unknown."""
    try:
        return str(read_json(path.parent / "tasks" / f"{task}.json")["scores"][task]["metric"])
    except (OSError, *DAMAGED):
        return ""


def deciding(metrics: Collection[str], first: str) -> str:
    """Return the metric of an item that says whether it is right: the first score's, or the first that is no loss."""
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
