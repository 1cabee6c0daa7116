"""The table of items that MLflow gets is bounded, and a damaged file does not stop the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.tracking.mlflow_run import COLUMNS, Progress, table
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from tests.hlatctl.item_rows import row, write_items

MILESTONE = MilestoneState(milestone_tokens=100, step=1)


def test_a_table_has_the_first_items_of_each_task_with_the_ends_of_their_texts(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    ranked = {"choices": [" no", " yes"], "loglikelihoods": [-2.0, -1.0], "target": "1"}
    long = row("0", 1.0, prompt="x" * 9_000 + "2 + 2 =", answer="4" * 9_000)
    write_items(run, 100, "gsm8k", [long, *(row(str(n), 0.0, **ranked) for n in range(1, 9))])
    first, second, *rest = (dict(zip(COLUMNS, values, strict=True)) for values in table(run, MILESTONE))
    assert (len(first["prompt"]), first["prompt"][-7:], len(first["answer"])) == (2_000, "2 + 2 =", 2_000)
    assert second["choices"] == "  -2.000 no\n> -1.000 yes"
    assert [each["item"] for each in rest] == ["2", "3", "4"]


def test_many_tasks_have_fewer_items_each(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    for number in range(70):
        write_items(run, 100, f"task{number:03}", [row(str(n), 0.0) for n in range(4)])
    assert len(table(run, MILESTONE)) == 140


def test_no_scan_of_the_corpus_is_read_for_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = RunPaths(tmp_path), list[Path]()
    monkeypatch.setattr("hlatctl.report.contamination.files.read_sealed_json", read.append)
    for task in ("gsm8k", "piqa"):
        write_items(run, 100, task, [row("0", 1.0)])
    (run.contamination(100) / "scan").mkdir(parents=True)
    (run.contamination(100) / "scan" / "result.json").touch()
    assert len(table(run, MILESTONE)) == 2
    assert read == []


def test_a_damaged_file_and_a_milestone_without_items_give_no_rows(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert table(run, MILESTONE) == []
    write_items(run, 100, "gsm8k", [row("0", 1.0)])
    (run.eval(100) / "items-broken.parquet").write_bytes(b"PAR1")
    assert [values[0] for values in table(run, MILESTONE)] == ["gsm8k"]


def test_a_long_copy_says_every_five_seconds_how_far_it_is() -> None:
    said: list[str] = []
    times = iter([0.0, 2.0, 10.0, 12.0, 20.0])
    progress = Progress(1000, said.append, lambda: next(times))
    for step in (0, 100, 500, 600, 1000):
        progress.reached(step, step)
    assert said == [
        "step 500 (50% of the journal), 50 steps/s, 10 s left",
        "step 1,000 (100% of the journal), 50 steps/s, 0.0 s left",
    ]
