"""The tables and items of OLMES, the evaluation system of Ai2.

``metrics.json`` has all tasks, with only those settings of a task that differ from OLMES's defaults. The lines of
``metrics-all.jsonl`` and the files ``task-*-metrics.json`` have one task with all settings.

Items are in ``task-*-predictions.jsonl`` and ``task-*-requests.jsonl`` next to ``metrics.json``. The predictions have
answers and metrics; documents, prompts and choices are only in the requests. Without requests, the items are shown, but
not paired with those of another run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hlatctl.report.exchange.exported import Entry, Exported
from hlatctl.report.exchange.imported import (
    Figures,
    Found,
    ItemRow,
    clean_name,
    is_file,
    lines,
    mapping,
    pairs,
    row,
    text,
    whole,
)
from hlatctl.run.files import parse_json, read_bytes

FORM = "olmes"
_PRIMARY = "primary_score"
#: Defaults of settings, which ``metrics.json`` omits.
_DEFAULTS = {"num_shots": 0, "limit": None}


def write(exported: Exported) -> dict[str, Any]:
    """Return the content of ``metrics.json``; the primary score of a task is its first one."""
    limit = exported.contract.get("limit")
    tasks = [_task(entry, limit) for entry in exported.entries]
    return {
        "all_primary_scores": [f"{task['alias']}: {task['metrics'][_PRIMARY]:.6}" for task in tasks],
        "tasks": tasks,
        "model_config": {"model": f"{exported.run.run_id}/step-{exported.milestone.step}"},
        "hlatctl": exported.origin,
    }


def read(value: dict[str, Any]) -> Figures:
    """Return the primary scores of a file, and metrics with a standard error, which OLMES itself doesn't write.

    ValueError: the file doesn't have this format.
    """
    model = mapping(value.get("model_config"))
    found = Figures(form=FORM, model=text(model.get("model")) or text(model.get("model_path")))
    tasks = _tasks(value)
    for name, task in zip(names(tasks), tasks, strict=True):
        config = _settings(task)
        found.date = found.date or text(task.get("current_date"))[:10]
        found.add(
            name,
            _scored(mapping(task.get("metrics", task)), str(config.get("primary_metric", ""))),
            n=whole(task.get("num_instances")),
            items=whole(task.get("num_instances")) if config.get("limit", 0) is None else None,
            shots=whole(config.get("num_shots")),
            version=text(config.get("version")) or None,
        )
    return found


def names(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the name of each task; with its shots if the task was measured with several numbers of them."""
    own = [_name(task) for task in tasks]
    often = Counter(own)
    return [
        f"{name}|{whole(_settings(task).get('num_shots'))}" if often[name] > 1 else name
        for name, task in zip(own, tasks, strict=True)
    ]


def _name(task: dict[str, Any]) -> str:
    """Return the name of a task: its alias, such as ``arc_easy:mc::olmes``, or else the name of its definition."""
    alias = mapping(mapping(task.get("task_config")).get("metadata")).get("alias")
    return text(task.get("alias") or alias or task.get("task_name") or task.get("task"))


def _tasks(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of ``metrics.json`` (``metrics`` in earlier releases), or the one of ``task-*-metrics.json``."""
    if "task_config" in value:
        return [value]
    tasks: list[dict[str, Any]] = value["tasks"] if "tasks" in value else value["metrics"]
    return tasks


def _settings(task: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a task. Each task of OLMES has a split; an aggregate has none, and no defaults."""
    config = mapping(task.get("task_config"))
    return {**_DEFAULTS, **config} if "split" in config else config


def _task(entry: Entry, limit: float | None) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for metric, variant, record in entry.keyed():
        key = f"{metric}:{variant}" if variant else metric
        metrics |= {key: record["value"], f"{key}_stderr": record.get("stderr")}
    first = next(iter(entry.scores.values()))
    return {
        "alias": entry.name,
        "metrics": {**metrics, _PRIMARY: first["value"]},
        "num_instances": entry.count,
        "task_config": {
            "task_name": entry.name,
            "primary_metric": first["metric"],
            "num_shots": entry.shots,
            "limit": _limit(entry, limit),
            "version": entry.version,
        },
    }


def _limit(entry: Entry, limit: float | None) -> int | None:
    """Return the number of items if it is less than the dataset: OLMES has no fractions and no chosen items."""
    is_whole = limit is None if entry.items is None else entry.items == entry.count
    return None if is_whole else entry.count


def _scored(metrics: dict[str, Any], primary: str) -> list[tuple[str, str, Any, Any]]:
    """Return the primary metric, then those with a standard error; the primary score if its metric is not there."""
    first = primary if primary in metrics else _PRIMARY
    others = {key: value for key, value in metrics.items() if f"{key}_stderr" in metrics and key != first}
    errors = {key: value for key, value in metrics.items() if key.endswith("_stderr")}
    return pairs({first: metrics.get(first), **others, **errors}, ":")


_METRICS, _PREDICTIONS, _REQUESTS = "metrics.json", "predictions.jsonl", "requests.jsonl"
#: Metrics and configuration of one task have some 10 KiB.
_MOST_BYTES = 16 << 20


def find_predictions(results: Path, value: Mapping[str, Any]) -> dict[str, Found]:
    """Return the files of predictions by the task's cleaned name; they are in the folder of ``metrics.json``.

    Args:
        value: content of ``results``: all tasks of the folder, or one task (``task_config``).
    """
    paths = [results] if "task_config" in value else sorted(results.parent.glob(f"task-*-{_METRICS}"))
    tasks = [mapping(parse_json(read_bytes(path, _MOST_BYTES), any_number=True)) for path in paths]
    found = {}
    for name, path in zip(names(tasks), paths, strict=True):
        prefix = path.name.removesuffix(_METRICS)
        predictions, requests = path.with_name(prefix + _PREDICTIONS), path.with_name(prefix + _REQUESTS)
        if is_file(predictions):
            found[clean_name(name)] = Found(path=predictions, rows=partial(_rows, predictions, requests))
    return found


def _rows(predictions: Path, requests: Path) -> Iterator[ItemRow]:
    asked = _asked(requests) if is_file(requests) else {}
    for line in lines(predictions):
        yield _row(line, asked.get(json.dumps(line["doc_id"]), {}))


def _asked(path: Path) -> dict[str, dict[str, Any]]:
    """Return document, first prompt and choices of each question. A prompt is stored once, not for each choice."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines(path):
        request = mapping(line["request"])
        context = request.get("context")
        prompt = context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)
        own = found.setdefault(
            json.dumps(line["doc_id"]), {"document": line.get("doc"), "prompt": prompt, "choices": []}
        )
        if "continuation" in request:
            own["choices"].append(str(request["continuation"]))
    return found


def _row(line: dict[str, Any], asked: dict[str, Any]) -> ItemRow:
    outputs = [mapping(each) for each in line["model_output"] or ()]
    written = outputs[0].get("continuation") if outputs else None
    return row(
        item=line["doc_id"],
        document=asked.get("document"),
        prompt=asked.get("prompt", ""),
        target=line.get("label"),
        metrics=mapping(line["metrics"]),
        choices=asked.get("choices", ()) if written is None else (),
        loglikelihoods=[each.get("sum_logits") for each in outputs],
        answer=str(written or ""),
    )
