"""The results file of lm-evaluation-harness: written for its tools and for others, and read.

Items are in ``samples_TASK_DATE.jsonl`` next to ``results_DATE.json``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from conf.of_run import of_run
from hlatctl.report.exchange.exported import Entry, Exported
from hlatctl.report.exchange.imported import (
    CHANCE,
    STDERR,
    Figures,
    Found,
    ItemRow,
    clean_name,
    finite,
    is_file,
    lines,
    mapping,
    pairs,
    row,
    some,
    text,
    whole,
)

FORM = "lm_eval"
_NO_FILTER = "none"


def write(exported: Exported) -> dict[str, Any]:
    """Return the file's content.

    ``results`` has each task's scores first, then the other metrics that the harness computed.
    """
    tasks = {entry.name: entry for entry in exported.entries if entry.metrics or not entry.members}
    groups = {entry.name: entry for entry in exported.entries if entry.name not in tasks}
    results = {name: _metrics(entry) for name, entry in (tasks | groups).items()}
    versions = exported.contract.get("versions", {})
    return {
        "results": results,
        **({"groups": {name: results[name] for name in groups}} if groups else {}),
        "group_subtasks": {name: list(entry.members) for name, entry in groups.items()},
        "versions": {name: entry.version for name, entry in tasks.items()},
        "n-shot": {name: entry.shots for name, entry in tasks.items()},
        "n-samples": {n: {"original": entry.items, "effective": entry.count} for n, entry in tasks.items()},
        "config": _config(exported),
        "lm_eval_version": versions.get("lm_eval"),
        "transformers_version": versions.get("transformers"),
        "hlatctl": exported.origin,
    }


def read(value: dict[str, Any]) -> Figures:
    """Return the figures of a file; ValueError if it doesn't have this format."""
    config = mapping(value.get("config"))
    found = Figures(
        form=FORM,
        version=text(value.get("lm_eval_version")),
        model=text(value.get("model_name")) or text(_of_arguments(config.get("model_args"))),
        date=_date(value.get("date")),
        limit=some(config.get("limit")),
    )
    # A version doesn't say how a chat's prompts are made, so such a score agrees with none.
    is_plain = not value.get("chat_template") and not value.get("system_instruction")
    shots, versions, counts = (mapping(value.get(key)) for key in ("n-shot", "versions", "n-samples"))
    for task, metrics in value["results"].items():
        count = mapping(counts.get(task))
        sizes = mapping(metrics.get("sample_count"))
        found.add(
            task,
            [
                (metric, variant, number, stderr)
                for metric, variant, number, stderr in pairs(metrics, ",")
                if metric not in ("alias", "name", "sample_len", "sample_count")
            ],
            n=whole(count.get("effective")) or next(filter(None, map(whole, sizes.values())), None),
            items=whole(count.get("original")),
            shots=whole(shots.get(task)),
            version=_version(versions.get(task)) if is_plain else None,
        )
    return found


def _version(version: Any) -> str | None:
    """Return a task's version; for a task without one, the harness writes ``Yaml`` or ``N/A``."""
    return None if version in ("Yaml", "N/A") else text(version) or None


def _metrics(entry: Entry) -> dict[str, Any]:
    """Return metrics under the harness's keys: the scores, then its other metrics, without the scores of guessing."""
    found: dict[str, Any] = {"alias": entry.name}
    counts: dict[str, int] = {}
    for metric, variant, record in entry.keyed():
        key = _key(entry, metric, record["value"]) or f"{metric},{variant or _NO_FILTER}"
        stderr = record.get("stderr")
        found |= {key: record["value"], _of_error(key): "N/A" if stderr is None else stderr}
        if isinstance(record.get("n"), int):
            counts[key] = record["n"]
    others = {key: value for key, value in entry.metrics.items() if not key.partition(",")[0].endswith(CHANCE)}
    return {**found, **others, **({"sample_count": counts} if entry.members and counts else {})}


def _key(entry: Entry, metric: str, value: float) -> str | None:
    """Return the harness's key of a score; None if it computed no such score."""
    same = (key for key, each in entry.metrics.items() if key.partition(",")[0] == metric and each == value)
    return next(same, None)


def _of_error(key: str) -> str:
    metric, comma, name = key.partition(",")
    return f"{metric}{STDERR}{comma}{name}"


def _config(exported: Exported) -> dict[str, Any]:
    run, fields = exported.run, exported.contract
    config = of_run(run)
    return {
        "model": fields.get("runner", config.eval.runner),
        "model_args": f"run={run.run_id},step={exported.milestone.step},dtype={fields.get('dtype')}",
        "batch_size": config.eval.batch_size,
        "device": fields.get("device"),
        "limit": fields.get("limit"),
        "random_seed": config.seed,
        "numpy_seed": config.seed,
        "torch_seed": config.seed,
        "fewshot_seed": config.seed,
    }


def _of_arguments(arguments: Any) -> Any:
    """Return the model that the harness's ``model_args`` name; a text until release 0.4.8, later an object."""
    if isinstance(arguments, str):
        arguments = dict(part.partition("=")[::2] for part in arguments.split(","))
    named = mapping(arguments)
    return next((named[key] for key in ("pretrained", "model", "path", "run") if key in named), "")


def _date(unix_s: Any) -> str:
    """Return the day of a file. The harness writes the time when it began."""
    number = finite(unix_s)
    return time.strftime("%Y-%m-%d", time.gmtime(number)) if number and 0 < number < 1e11 else ""


def find_samples(results: Path, value: Mapping[str, Any]) -> dict[str, Found]:
    """Return the files of samples by the task's cleaned name; only ``results_DATE.json`` has any."""
    date = results.name.removeprefix("results_").removesuffix(".json")
    if date == results.name.removesuffix(".json"):
        return {}
    paths = {task: results.with_name(f"samples_{task}_{date}.jsonl") for task in value["results"] if "/" not in task}
    return {
        clean_name(task): Found(path=path, rows=partial(_rows, path)) for task, path in paths.items() if is_file(path)
    }


def _rows(path: Path) -> Iterator[ItemRow]:
    return map(_row, lines(path))


def _row(line: dict[str, Any]) -> ItemRow:
    """Return an item; the harness writes the numbers of its answers as texts."""
    requests, answers = _requests(line["arguments"]), line["filtered_resps"]
    choices = [request[1] for request in requests if len(request) > 1 and isinstance(request[1], str)]
    likelihoods = [each[0] for each in answers if isinstance(each, list) and len(each) == 2]
    return row(
        item=line["doc_id"],
        document=line.get("doc"),
        prompt=str(requests[0][0]) if requests and requests[0] else "",
        target=line["target"],
        metrics={name: line[name] for name in line["metrics"]},
        choices=choices,
        loglikelihoods=likelihoods,
        answer=_first_text(answers),
        answer_filter=line["filter"],
    )


def _requests(arguments: Any) -> list[list[Any]]:
    """Return the arguments of each request; since release 0.4.2 ``{"gen_args_0": {"arg_0": …}}``, before that lists."""
    each = arguments.values() if isinstance(arguments, dict) else arguments
    return [list(request.values()) if isinstance(request, dict) else list(request) for request in each]


def _first_text(answers: Any) -> str:
    while isinstance(answers, list) and answers:
        answers = answers[0]
    return answers if isinstance(answers, str) else ""
