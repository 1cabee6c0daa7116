"""Scores as records, the files that hold them, and the Parquet files of a task's items.

``items-<task>.parquet`` contains each item's question and answer, in one schema for ranked choices, generated answers
and programs. These files are for people and tools; scores are computed without them. Few-shot prompts repeat
the same examples, so zstd reduces them to a small part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import schema
from hlatctl.run.files import new_file

_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Score:
    """A value and its standard error.

    Args:
        metric: name, such as ``acc`` or ``loss_nats_per_token``.
        stderr: None if it can't be estimated.
        n: number of items (tokens, for validation).
        chance: the score of guessing; None if it is unknown.
    """

    metric: str
    value: float
    stderr: float | None
    n: int
    chance: float | None = None


Scores = dict[str, Score]


def check_finite(scores: Scores) -> None:
    """Refuse scores that are not finite with an EvaluationError, because then the weights can't be used."""
    for name, score in scores.items():
        if not math.isfinite(score.value):
            raise EvaluationError(
                f"{name}: {score.metric} is {score.value}, so the model's weights are not usable",
                hint="training has diverged; look at loss and gradient norm before this step",
            )


def mean_error(values: Collection[float]) -> float | None:
    """Return the standard error of a mean over items, as the harness computes it; None for a single item."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def to_json(scores: Scores) -> dict[str, dict[str, Any]]:
    """Return scores in the format of results.json and the journal."""
    return {name: asdict(score) for name, score in scores.items()}


class DamagedResultsError(ValueError):
    """A results file can't be read, or differs from what was written."""


def write_results(path: Path, *, identity: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Write a results file with a checksum, atomically, and return its record."""
    record = {"v": _VERSION, **identity, **fields}
    files.write_sealed_json(path, record)
    return record


def read_results(path: Path, *, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of a results file; None if it is missing or has another identity (step, weights, contract).

    DamagedResultsError: the file is damaged.
    """
    try:
        record = files.read_sealed_json(path)
        wanted = {"v": _VERSION, **identity}
        return record if {key: record.get(key) for key in wanted} == wanted else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedResultsError(f"{path}: can't be used ({error})") from None


def write_items(path: Path, task: str, samples: Iterable[dict[str, Any]]) -> None:
    """Write the harness's samples, or tested programs, as the items of a task, replacing the file as a whole."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"task": task, **(_of_program(each) if "task_id" in each else _of_question(each))} for each in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema(pa)), file, compression="zstd")


def _of_question(sample: dict[str, Any]) -> dict[str, Any]:
    requests = sample["arguments"]
    is_ranked = all(len(request) > 1 and isinstance(request[1], str) for request in requests)
    given = sample["filtered_resps"]
    return {
        "item": str(sample["doc_id"]),
        "filter": sample["filter"],
        "document": json.dumps(sample["doc"], default=str, ensure_ascii=False),
        "prompt": str(requests[0][0]) if requests else "",
        "target": str(sample["target"]),
        "choices": [request[1] for request in requests] if is_ranked else [],
        "loglikelihoods": [float(each[0]) for each in given] if is_ranked else [],
        "answer": "" if is_ranked else str(given[0] if given else ""),
        "metrics": [(n, float(sample[n])) for n in sample["metrics"] if isinstance(sample[n], int | float)],
        "result": "",
    }


def _of_program(program: dict[str, Any]) -> dict[str, Any]:
    return {
        "item": str(program["task_id"]),
        "filter": "none",
        "document": "",
        "prompt": str(program.get("prompt", "")),
        "target": "",
        "choices": [],
        "loglikelihoods": [],
        "answer": str(program["completion"]),
        "metrics": [("passed", float(program["passed"]))],
        "result": str(program["result"]),
    }
