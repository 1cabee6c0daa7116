"""Items of a milestone are read from the files that an evaluation writes."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from hlatctl.report.items import groups, means_over_tasks, read_items
from hlatctl.run import files
from hlatctl.run.contract import Contracts, admit
from hlatctl.run.errors import EvaluationError
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from tests.hlatctl.item_rows import row, write_items

MILESTONE = MilestoneState(milestone_tokens=100, step=1)


def line(number: int, filter_name: str = "none", **values: Any) -> dict[str, Any]:
    asked = {"document": json.dumps({"n": number}), "prompt": f"prompt{number}", "target": "B", "answer": "B"}
    return row(str(number), 0.0, filter=filter_name, metrics=list(values.items()), **asked)


def evaluated(folder: Path, task: str, lines: list[dict[str, Any]], metric: str = "") -> RunPaths:
    run = RunPaths(folder)
    scores = {task: {"metric": metric}} if metric else {}
    files.write_json(run.eval(100) / "tasks" / f"{task}.json", {"scores": scores})
    write_items(run, 100, task, [{**each, "task": task} for each in lines])
    return run


def test_items_have_the_metric_of_the_tasks_score_in_its_first_filter(tmp_path: Path) -> None:
    lines = [
        line(n, name, acc=0.0, exact_match=float(name == "strict")) for n in (0, 1) for name in ("strict", "loose")
    ]
    found = read_items(evaluated(tmp_path, "gsm", lines, "exact_match"), MILESTONE)["gsm"]
    assert found.metric == "exact_match"
    assert found.items
    assert [(item.name, item.value, item.answer) for item in found.items.values()] == [("0", 1.0, "B"), ("1", 1.0, "B")]
    document, prompt, target = (sha256(text.encode()).hexdigest() for text in ('{\n  "n": 1\n}', "prompt1", "B"))
    assert (found.items["1"].asked, found.items["1"].document) == (
        f"{document} {prompt} {target}",
        f"{document} {target}",
    )


def test_a_code_tasks_item_is_a_problem_with_the_mean_over_its_programs(tmp_path: Path) -> None:
    lines = [row("p", 0.0, answer=f"try {n}", metrics=[("passed", float(n > 0))]) for n in range(4)]
    found = read_items(evaluated(tmp_path, "code", lines, "pass@1"), MILESTONE)["code"]
    assert found.items
    assert (found.metric, found.items["p"].value, found.items["p"].answer) == ("pass@1", 0.75, "try 0")


@pytest.mark.parametrize("lines", [[line(0, f1=0.5), line(1, f1=math.nan)], [line(0, f1=math.inf)], [line(0)]])
def test_a_metric_that_is_no_finite_number_for_each_item_has_no_items(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    assert read_items(evaluated(tmp_path, "f1", lines, "f1"), MILESTONE)["f1"].items is None


def test_tasks_of_a_group_are_one_row_if_it_is_whole(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "mmlu_law", [line(0, acc=1.0)], "acc")
    for task in ("mmlu_art", "boolq"):
        evaluated(tmp_path, task, [line(0, acc=1.0)], "acc")
    size = [{"metric": "acc", "weight_by_size": True}, {"metric": "acc_norm"}]
    mean = [{"metric": "acc", "weight_by_size": False}]
    admit(
        run,
        Contracts(
            tasks={},
            figures={
                "mmlu_arts": {"aggregate": size, "tasks": {"mmlu_art": "a"}},
                "mmlu": {"aggregate": size, "tasks": {"mmlu_law": "l", "mmlu_art": "a"}},
                "reading": {"aggregate": mean, "tasks": {"boolq": "b"}},
                "partly": {"aggregate": mean, "tasks": {"boolq": "b", "none": "n"}},
            },
        ),
    )
    assert groups(run, read_items(run, MILESTONE)) == {"mmlu": ["mmlu_art", "mmlu_law"], "reading": ["boolq"]}
    assert means_over_tasks(run) == {("reading", "acc"), ("partly", "acc")}


@pytest.mark.parametrize("damage", ["", "PAR1", "PAR1 no"])
def test_a_damaged_file_is_an_error_with_a_hint(tmp_path: Path, damage: str) -> None:
    run = evaluated(tmp_path, "t", [line(0, acc=1.0)], "acc")
    files.write_text(run.eval(100) / "items-t.parquet", damage)
    with pytest.raises(EvaluationError, match=r"items-t.parquet: can't be read") as error:
        read_items(run, MILESTONE)
    assert error.value.hint
