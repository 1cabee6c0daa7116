"""The results file and items of lighteval: tasks are named ``task|shots``, earlier ``suite|task|shots``.

Releases since 0.11 write a task's version with its configuration, ``?`` as their own version if they are an installed
package, and -1 as the number of items. Items are in ``details_TASK_DATE.parquet``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hlatctl.report.exchange.exported import Exported
from hlatctl.report.exchange.imported import (
    MOST_FILE_BYTES,
    Figures,
    Found,
    ItemRow,
    clean_name,
    is_file,
    mapping,
    pairs,
    row,
    text,
    whole,
)
from hlatctl.report.items import batch_rows
from hlatctl.run.files import open_regular
from hlatctl.units import size

FORM = "lighteval"
#: Means of all tasks of a file, and of a benchmark's subsets.
_ALL, _AVERAGE = "all", ":_average"


def write(exported: Exported) -> dict[str, Any]:
    """Return the file's content, without a mean of all tasks and without values that only lighteval knows."""
    titles = {entry.name: f"{entry.name}|{entry.shots or 0}" for entry in exported.entries}
    return {
        "config_general": {
            "lighteval_sha": None,
            "num_fewshot_seeds": 1,
            "max_samples": whole(exported.contract.get("limit")),  # a fraction has no place there
            "model_name": f"{exported.run.run_id}/step-{exported.milestone.step}",
        },
        "results": {
            titles[entry.name]: {
                key: number
                for metric, variant, record in entry.keyed()
                for key, number in _named(f"{metric}:{variant}" if variant else metric, record)
            }
            for entry in exported.entries
        },
        "versions": {titles[entry.name]: entry.version for entry in exported.entries},
        "config_tasks": {
            titles[entry.name]: {
                "name": entry.name,
                "num_fewshots": entry.shots,
                "original_num_docs": entry.items,
                "effective_num_docs": entry.count,
                "version": entry.version,
            }
            for entry in exported.entries
        },
        "summary_tasks": {},
        "summary_general": {},
        "hlatctl": exported.origin,
    }


def read(value: dict[str, Any]) -> Figures:
    """Return the figures of a file, without the mean of all tasks; ValueError if it doesn't have this format."""
    general = value["config_general"]
    found = Figures(
        form=FORM,
        version=text(general.get("lighteval_sha")).removeprefix("?"),
        model=text(general.get("model_name")) or text(mapping(general.get("model_config")).get("model_name")),
        limit=whole(general.get("max_samples")),
    )
    configs, versions = mapping(value.get("config_tasks")), mapping(value.get("versions"))
    for title, name in names(value["results"]).items():
        config = mapping(configs.get(title, configs.get(title.rpartition("|")[0])))
        found.add(
            name,
            pairs(value["results"][title], ":"),
            n=whole(config.get("effective_num_docs")),
            items=whole(config.get("original_num_docs")),
            shots=_split(title)[1],
            version=text(versions.get(title, config.get("version"))) or None,
        )
    return found


def names(titles: Iterable[str]) -> dict[str, str]:
    """Return the name of each task by its title; with its shots if the task was measured with several numbers of them.

    The mean of all tasks has no name.
    """
    tasks = {title: _split(title)[0].removesuffix(_AVERAGE) for title in titles if title != _ALL}
    often = Counter(tasks.values())
    return {title: f"{name}|{_split(title)[1]}" if often[name] > 1 else name for title, name in tasks.items()}


def _named(metric: str, record: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(metric, record["value"]), (f"{metric}_stderr", record.get("stderr"))]


def _split(title: str) -> tuple[str, int | None]:
    """Return task and shots of ``task|5``, ``suite|task|5`` or ``suite|task|5|0``."""
    parts = title.split("|")
    place = 0 if len(parts) < 3 else 1
    shots = parts[place + 1] if len(parts) > place + 1 else ""
    return parts[place], int(shots) if shots.isascii() and shots.isdigit() and len(shots) < 5 else None


#: lighteval 0.11 and later; earlier releases wrote other columns.
_COLUMNS = {
    "doc": ("id", "query", "choices", "gold_index", "instruction", "fewshot_samples"),
    "metric": (),
    "model_response": ("input", "text", "text_post_processed", "logprobs"),
}


def find_details(results: Path, value: Mapping[str, Any]) -> dict[str, Found]:
    """Return the files of details by the task's cleaned name; only ``results_DATE.json`` has any."""
    date = results.name.removeprefix("results_").removesuffix(".json")
    if date == results.name.removesuffix(".json"):
        return {}
    found: dict[str, Found] = {}
    folders = _folders(results, date)
    for title, name in names(value["results"]).items():
        paths = [folder / f"details_{title}_{date}.parquet" for folder in folders if "/" not in title]
        if path := next(filter(is_file, paths), None):
            found[clean_name(name)] = Found(path=path, rows=partial(_rows, path))
    return found


def _folders(results: Path, date: str) -> list[Path]:
    """Return possible folders of details: in a copy from a hub, and below the output folder (``results/MODEL``)."""
    parts = results.parent.absolute().parts
    places = [
        Path(*parts[:at], "details", *parts[at + 1 :], date) for at, name in enumerate(parts) if name == "results"
    ]
    return [results.parent / date, *reversed(places)]


def _rows(path: Path) -> Iterator[ItemRow]:
    from pyarrow import parquet

    seen: Counter[str] = Counter()
    with open(path, "rb", opener=open_regular) as opened, parquet.ParquetFile(opened) as file:
        wanted = [".".join(filter(None, (name, part))) for name, parts in _COLUMNS.items() for part in parts or ("",)]
        for batch in file.iter_batches(batch_size=_batch_rows(file), columns=wanted):
            for detail in batch.to_pylist():
                yield _row(detail, seen)


def _batch_rows(file: Any) -> int:
    """Return how many rows to read at a time.

    A file that repeats a text in each row can be very small. ValueError: the file is too large, or has another format.
    """
    if missing := [name for name in _COLUMNS if name not in file.schema_arrow.names]:
        raise ValueError(f"has no column {missing[0]}; only details of lighteval 0.11 and later are read")
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > MOST_FILE_BYTES:
        raise ValueError(f"has more than {size(MOST_FILE_BYTES)}")
    return batch_rows(file)


def _row(detail: dict[str, Any], seen: Counter[str]) -> ItemRow:
    """Return an item. If a task has several splits, the numbers of its items restart in each of them."""
    doc, response = detail["doc"], detail["model_response"]
    number = text(doc["id"])
    seen[number] += 1
    asked, written = response.get("input"), response.get("text_post_processed") or response.get("text") or [""]
    return row(
        item=number if seen[number] == 1 else f"{number}_{seen[number]}",
        document={name: doc.get(name) for name in ("query", "choices", "gold_index", "instruction")},
        prompt=_prompt(doc) if asked is None else asked if isinstance(asked, str) else json.dumps(asked),
        target=_target(doc),
        metrics=_metrics(detail["metric"]),
        choices=doc["choices"] or (),
        loglikelihoods=response.get("logprobs") or (),
        answer=str(written[0]),
    )


def _prompt(doc: dict[str, Any]) -> str:
    """Return the solved examples and the question, as a substitute for a prompt that lighteval didn't write."""
    examples = doc.get("fewshot_samples") or ()
    return "\n\n".join([*(f"{each['query']} {_target(each)}" for each in examples), str(doc["query"])])


def _target(doc: dict[str, Any]) -> str:
    gold = doc["gold_index"]
    places = gold if isinstance(gold, list) else [gold]
    choices = doc["choices"] or ()
    return " | ".join(str(choices[place]).strip() for place in places if 0 <= place < len(choices))


def _metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, also under their names without settings, which a task's first score uses."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        found.setdefault(name.partition(":")[0], value)
        found[name] = value
    return found
