"""Reads the items of a task from ``items-<task>.parquet``, or the JSON lines of evaluations by earlier releases."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import contract_record
from hlatctl.run.errors import EvaluationError
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED, read_text, why
from hlatctl.run.state import MilestoneState

_COLUMNS = ["item", "filter", "document", "prompt", "target", "choices", "answer", "metrics"]
#: Prefix and suffix of the files, newest form first.
_FORMS = (("items-", ".parquet"), ("samples-", ".jsonl"))


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one question gave under one filter, or what one program did.

    Args:
        item: its number in the dataset, or the problem's id.
        asked: hashes of document, prompt and right answer, as lm-evaluation-harness makes them; empty for a program.
        metrics: value of each metric; of older files, a value can be any JSON value.
        choices: answers that were ranked; 0 if the model wrote its answer.
    """

    item: str
    filter: str
    asked: str
    target: str
    answer: str
    choices: int
    metrics: dict[str, Any]


def folder_of(run: RunPaths, milestone: MilestoneState) -> Path:
    """Return the folder of the results of a milestone that its state shows."""
    return run.eval(milestone.milestone_tokens) / contract_record.folder(milestone.contract)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each task's items, by the task's name."""
    found: dict[str, Path] = {}
    for before, after in _FORMS:
        for path in sorted(folder.glob(f"{before}*{after}")):
            found.setdefault(path.name[len(before) : -len(after)], path)
    return dict(sorted(found.items()))


def read_lines(path: Path, hint: str) -> list[Line]:
    """Return the lines of a task's file.

    Raises:
        EvaluationError: the file is damaged; it has this hint.
    """
    try:
        return list(_of_parquet(path) if path.suffix == ".parquet" else _of_json(path))
    except (OSError, *DAMAGED) as error:
        raise EvaluationError(f"{path}: can't be read ({why(error)})", hint=hint) from None


def _of_parquet(path: Path) -> Iterator[Line]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, columns=_COLUMNS):
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


def _of_json(path: Path) -> Iterator[Line]:
    for text in read_text(path).splitlines():
        line = json.loads(text)
        yield _of_program(line) if "task_id" in line else _of_question(line)


def _of_question(line: dict[str, Any]) -> Line:
    answer = line["filtered_resps"][0] if line["filtered_resps"] else ""
    return Line(
        item=str(line["doc_id"]),
        filter=line["filter"],
        asked=f"{line['doc_hash']} {line['prompt_hash']} {line['target_hash']}",
        target=str(line["target"]),
        answer=answer if isinstance(answer, str) else "",
        choices=0 if isinstance(answer, str) else len(line["filtered_resps"]),
        metrics={name: line[name] for name in line["metrics"]},
    )


def _of_program(line: dict[str, Any]) -> Line:
    return Line(
        item=str(line["task_id"]),
        filter="none",
        asked="",
        target="",
        answer=str(line["completion"]),
        choices=0,
        metrics={"passed": float(line["passed"])},
    )
