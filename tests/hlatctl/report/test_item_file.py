"""`hlatctl eval show`: items of a task with prompts, choices and answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyarrow import parquet

from hlatctl.cli.main import main
from hlatctl.report import item_file, items
from hlatctl.report.item_file import deciding
from hlatctl.run.errors import EvaluationError
from hlatctl.run.paths import RunPaths
from tests.hlatctl.item_rows import row, write_items
from tests.hlatctl.scored_runs import hlat_scores, scored_run

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
    monkeypatch.setattr(item_file, "_MOST_BATCH_BYTES", 4_000)
    with parquet.ParquetFile(path) as file:
        assert item_file.batch_rows(file) == 1
    monkeypatch.setattr(item_file, "_MOST_COLUMN_BYTES", 1_000)
    code, _, error = show(run, capsys, "--task", "gsm8k")
    assert (code, "has a column of" in error) == (21, True)
    with pytest.raises(EvaluationError, match="has a column of"):
        items.read_lines(path, hint="")
