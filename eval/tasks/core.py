"""The 22 tasks of CORE (DCLM, arXiv 2406.11794): their files, solved examples, delimiters and scores of guessing.

The rows are those of ``core.yaml`` and ``eval_meta_data.csv`` in nanochat's evaluation bundle, with which nanochat's
published CORE scores were measured. A public copy of these two files has the same rows; :func:`check_bundle`
compares them with the bundle's own files. ``eval.tasks.core_task`` renders and scores the items, and
``eval.tasks.bundle`` downloads the files.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from conf.load import SAFE_LOADER
from hlatctl.run.errors import DataError
from hlatctl.run.files import read_bytes

Kind = Literal["multiple_choice", "schema", "language_modeling"]

#: The bundle's folder below ``eval.data_dir``, as its archive has it.
BUNDLE = "eval_bundle"
CONFIG, BASELINES, ITEMS = "core.yaml", "eval_meta_data.csv", "eval_data"
#: What all tasks share, as a definition of the harness.
DEFINITION = Path(__file__).with_name("core.yaml")
#: The scores of a task, the one that CORE averages first.
METRICS = ("centered", "acc")
_PREFIX = "core_"


@dataclass(frozen=True)
class Row:
    """One task.

    Args:
        label: its name in the bundle.
        file: its items, below the bundle's ``eval_data``.
        kind: ``multiple_choice`` ranks answers to one question, ``schema`` one ending of several beginnings, and
            ``language_modeling`` asks for the continuation.
        shots: solved examples before each item.
        baseline_percent: accuracy of guessing, which gets the centered score 0.
        delimiter: text between a question and its answer.
    """

    label: str
    file: str
    kind: Kind
    shots: int
    baseline_percent: float
    delimiter: str = " "

    @property
    def name(self) -> str:
        """The task's name here. The harness has some of the labels, with other prompts and scores."""
        return f"{_PREFIX}{self.label}"

    @property
    def place(self) -> str:
        """The path of its items below ``eval.data_dir``."""
        return f"{BUNDLE}/{ITEMS}/{self.file}"

    def definition(self) -> dict[str, Any]:
        """Return the keys of its definition that the other tasks don't share."""
        return {
            "task": self.name,
            "output_type": "loglikelihood" if self.kind == "language_modeling" else "multiple_choice",
            "num_fewshot": self.shots,
            "metadata": {"kind": self.kind, "delimiter": self.delimiter, "baseline_percent": self.baseline_percent},
        }


_ANSWER = "\nAnswer: "

ROWS = (
    Row("hellaswag_zeroshot", "language_understanding/hellaswag.jsonl", "multiple_choice", 0, 25.0),
    Row("jeopardy", "world_knowledge/jeopardy_all.jsonl", "language_modeling", 10, 0.0, _ANSWER),
    Row("bigbench_qa_wikidata", "world_knowledge/bigbench_qa_wikidata.jsonl", "language_modeling", 10, 0.0),
    Row("arc_easy", "world_knowledge/arc_easy.jsonl", "multiple_choice", 10, 25.0, _ANSWER),
    Row("arc_challenge", "world_knowledge/arc_challenge.jsonl", "multiple_choice", 10, 25.0, _ANSWER),
    Row("copa", "commonsense_reasoning/copa.jsonl", "multiple_choice", 0, 50.0),
    Row("commonsense_qa", "commonsense_reasoning/commonsense_qa.jsonl", "multiple_choice", 10, 20.0),
    Row("piqa", "commonsense_reasoning/piqa.jsonl", "multiple_choice", 10, 50.0, _ANSWER),
    Row("openbook_qa", "commonsense_reasoning/openbook_qa.jsonl", "multiple_choice", 0, 25.0),
    Row("lambada_openai", "language_understanding/lambada_openai.jsonl", "language_modeling", 0, 0.0),
    Row("hellaswag", "language_understanding/hellaswag.jsonl", "multiple_choice", 10, 25.0),
    Row("winograd", "language_understanding/winograd_wsc.jsonl", "schema", 0, 50.0),
    Row("winogrande", "language_understanding/winogrande.jsonl", "schema", 0, 50.0),
    Row(
        "bigbench_dyck_languages",
        "symbolic_problem_solving/bigbench_dyck_languages.jsonl",
        "language_modeling",
        10,
        0.0,
    ),
    Row("agi_eval_lsat_ar", "symbolic_problem_solving/agi_eval_lsat_ar.jsonl", "multiple_choice", 3, 20.0),
    Row(
        "bigbench_cs_algorithms", "symbolic_problem_solving/bigbench_cs_algorithms.jsonl", "language_modeling", 10, 0.0
    ),
    Row("bigbench_operators", "symbolic_problem_solving/bigbench_operators.jsonl", "language_modeling", 10, 0.0),
    Row(
        "bigbench_repeat_copy_logic",
        "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl",
        "language_modeling",
        10,
        0.0,
    ),
    Row("squad", "reading_comprehension/squad.jsonl", "language_modeling", 10, 0.0),
    Row("coqa", "reading_comprehension/coqa.jsonl", "language_modeling", 0, 0.0),
    Row("boolq", "reading_comprehension/boolq.jsonl", "multiple_choice", 10, 62.0, _ANSWER),
    Row(
        "bigbench_language_identification",
        "language_understanding/bigbench_language_identification.jsonl",
        "multiple_choice",
        10,
        9.1,
    ),
)
TASKS = {row.name: row for row in ROWS}


def check_bundle(data_dir: Path, names: Iterable[str]) -> None:
    """Refuse a bundle whose own files describe these tasks otherwise; files that are missing are not compared.

    Raises:
        DataError: names the file, the task and both values.
    """
    config, baselines = data_dir / BUNDLE / CONFIG, data_dir / BUNDLE / BASELINES
    try:
        described = _described(config) if config.is_file() else {}
        guessed = _guessed(baselines) if baselines.is_file() else {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        raise DataError(
            f"{data_dir / BUNDLE}: {CONFIG} or {BASELINES} can't be read ({type(error).__name__}: {error})",
            hint="unpack the bundle again",
        ) from None
    for row in (TASKS[name] for name in names):
        for file, found, wanted in (
            (config, described.get(row.label), (row.file, row.kind, row.shots, row.delimiter)),
            (baselines, guessed.get(row.label), row.baseline_percent),
        ):
            if found is not None and found != wanted:
                raise DataError(
                    f"{file}: {row.label} is {found}, and eval=core has {wanted}",
                    hint="use the bundle with which nanochat's scores were measured: "
                    "hlatctl eval data download --to DIR eval=core",
                )


def _described(path: Path) -> dict[str, tuple[Any, ...]]:
    tasks = yaml.load(read_bytes(path), Loader=SAFE_LOADER)["icl_tasks"]
    return {
        task["label"]: (
            task["dataset_uri"],
            task["icl_task_type"],
            task["num_fewshot"][0],
            task.get("continuation_delimiter", " "),
        )
        for task in tasks
    }


def _guessed(path: Path) -> dict[str, float]:
    rows = csv.DictReader(io.StringIO(read_bytes(path).decode()))
    return {row["Eval Task"]: float(row["Random baseline"]) for row in rows if row["Eval Task"] in _LABELS}


_LABELS = {row.label for row in ROWS}
