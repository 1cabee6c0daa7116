"""Items of a milestone are read from the files that an evaluation writes."""

from __future__ import annotations

import json
import math
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from hlatctl.cli.main import main
from hlatctl.report import items
from hlatctl.report.items import deciding, groups, means_over_tasks, read_items
from hlatctl.run import files
from hlatctl.run.contract import Contracts, admit
from hlatctl.run.errors import EvaluationError
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from tests.hlatctl.item_rows import row, write_items
from tests.hlatctl.scored_runs import hlat_scores, scored_run

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


TOKENS = 400_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = scored_run(tmp_path / "runs", "base", hlat_scores())
    ranked = {"choices": [" no", " yes"], "loglikelihoods": [-2.0, -1.0], "target": "0"}
    rows = [
        row("0", 1.0, prompt="2 + 2 =", answer="4", target="4"),
        row("1", 0.0, prompt="x" * 2_000 + "3 + 3 =", answer="5\x1b[31m", target="6"),
        row("2", 0.0, **ranked),
    ]
    write_items(run, TOKENS, "gsm8k", rows)
    return run


def show(run: RunPaths, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["eval", "show", "base", *argv, "--runs-dir", os.fspath(run.root.parent)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_wrong_items_are_shown_with_the_end_of_their_prompt_and_the_choice(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = show(run, capsys, "--task", "gsm8k", "--wrong")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("==")] == [
        "== gsm8k 1: exact_match 0",
        "== gsm8k 2: exact_match 0",
    ]
    assert "xxx3 + 3 =" in out
    assert "answer: 5\\x1b[31m" in out, "control characters are shown by their codes"
    assert "  >    -1.000 yes" in out
    assert len(out) < 2_000


def test_a_metric_and_a_limit_can_be_chosen(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        show(run, capsys, "--task", "gsm8k", "--right", "--metric", "other", "--limit", "1", "--json")[1]
    )
    assert [(item["item"], item["metric"], item["value"]) for item in found] == [("1", "other", 1.0)]
    code, out, error = show(run, capsys, "--task", "gsm8k", "--right", "--at", "400B", "--limit", "9")
    assert (code, out.count("=="), error) == (0, 1, "")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--task", "gsm8"],
            "error: --task=gsm8: the milestone has no items of such a task\nhint: did you mean gsm8k?",
        ),
        (["--task", "../x"], "error: --task=../x: the milestone has no items of such a task\n"),
        (["--task", "gsm8k", "--metric", "exact"], "error: --metric=exact: gsm8k has no such metric\n"),
        (["--task", "gsm8k", "--wrong", "--right"], "error: --wrong --right: an item is one of both\n"),
        (
            ["--task", "gsm8k", "--at", "200B"],
            "error: --task=gsm8k: the milestone has no items of such a task\nhint: simulations and imp",
        ),
    ],
)
def test_bad_input_is_an_error(run: RunPaths, argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = show(run, capsys, *argv)
    assert (code, out) == (10, "")
    assert err.startswith(error)
    assert "hint: " in err


def test_a_damaged_file_is_an_error(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    (run.eval(TOKENS) / "items-gsm8k.parquet").write_bytes(b"PAR1 no")
    code, _, error = show(run, capsys, "--task", "gsm8k")
    assert code == 21
    assert "items-gsm8k.parquet: can't be read" in error


def test_an_item_is_right_by_its_accuracy_even_if_its_perplexity_comes_first() -> None:
    assert deciding(["perplexity", "acc", "bits_per_byte"], "perplexity") == "acc"
    assert deciding(["acc", "acc_norm"], "acc_norm") == "acc_norm"
    assert deciding(["perplexity"], "") == "perplexity"
    assert deciding([], "acc") == ""


def test_few_rows_are_in_memory_if_a_small_file_says_a_large_text_for_each(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.eval(TOKENS) / "items-gsm8k.parquet"
    monkeypatch.setattr(items, "_MOST_BATCH_BYTES", 4_000)
    with parquet.ParquetFile(path) as file:
        assert items.batch_rows(file) == 1
    monkeypatch.setattr(items, "_MOST_COLUMN_BYTES", 1_000)
    code, _, error = show(run, capsys, "--task", "gsm8k")
    assert (code, "has a column of" in error) == (21, True)
    with pytest.raises(EvaluationError, match="has a column of"):
        items.read_lines(path, hint="")
