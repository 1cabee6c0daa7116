"""Overlapping items: their counts, the scores without them, and where they are shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hlatctl.report.contamination import Mean, Scanned, in_corpus, lacks, overlap, read_overlaps, scanned, text
from hlatctl.report.items import read_items
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState, RunState
from tests.hlatctl.report.test_items import MILESTONE, evaluated, line


def found(number: int, total: int) -> dict[str, Any]:
    return {"ngrams": total, "found": number, "example": "to be or not to be", "file": "hamlet\x1b.txt", "row": 3}


def searched(
    run: RunPaths,
    overlapping: dict[str, dict[str, Any]] | None = None,
    *,
    task: str = "quiz",
    tokens: int = 100,
    at: float = 1.0,
) -> Scanned:
    tasks = {task: {"words": 13, "items": 4, "short": 1, "overlapping": overlapping or {}}}
    path = run.contamination(tokens) / f"{task}-{at}" / "result.json"
    files.write_sealed_json(path, {"tasks": tasks, "finished_unix_s": at})
    return scanned(tasks, tokens)[task]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run with four items, of which two are right."""
    return evaluated(tmp_path, "quiz", [line(n, acc=float(n < 2)) for n in range(4)], "acc")


def test_the_scores_without_overlapping_items_are_means_of_the_others(run: RunPaths) -> None:
    task = searched(run, {"0": found(7, 10), "3": found(1, 10)})
    row = overlap("quiz", task, read_items(run, MILESTONE)["quiz"])
    assert (list(row.scanned.overlapping), row.mostly, row.scanned.short) == (["0", "3"], 1, 1)
    assert row.everything
    assert (row.everything.value, row.everything.n) == (0.5, 4)
    assert row.everything.stderr == pytest.approx(math.sqrt(1 / 3 / 4))
    assert row.clean == Mean(0.5, 0.5, 2)
    assert "2 (50.0%)" in text([row])
    assert "0.500 ± 0.289" in text([row])


def test_a_task_without_scores_or_clean_items_has_no_mean(run: RunPaths) -> None:
    task = searched(run, {str(n): found(1, 1) for n in range(4)})
    row = overlap("quiz", task, read_items(run, MILESTONE)["quiz"])
    assert (row.clean, row.mostly) == (None, 4)
    unscored = overlap("quiz", task, None)
    assert (unscored.metric, unscored.everything, unscored.clean) == ("", None, None)


_STATE = RunState(milestones={100: MILESTONE, 200: MilestoneState(milestone_tokens=200, step=2)})


def test_each_task_is_read_from_the_newest_scan_that_had_it(run: RunPaths) -> None:
    assert read_overlaps(run, _STATE) is None
    searched(run, {"0": found(7, 10)}, at=2.0)
    searched(run, {"1": found(7, 10)}, at=1.0)
    searched(run, task="other", at=3.0)
    later = searched(run, {"2": found(1, 10)}, task="other", tokens=200, at=0.5)
    known = read_overlaps(run, _STATE)
    assert known
    rows = {row.task: row for row in known.rows}
    assert (list(rows), known.unscanned) == (["other", "quiz"], [])
    assert rows["other"].scanned == later
    assert (rows["quiz"].scanned.milestone_tokens, list(rows["quiz"].scanned.overlapping)) == (100, ["0"])
    assert rows["quiz"].everything, "the means are those of the scan's milestone"


def test_tasks_and_items_that_no_scan_has_had_are_named(run: RunPaths) -> None:
    evaluated(run.root, "unseen", [line(n, acc=1.0) for n in range(2)], "acc")
    evaluated(run.root, "quiz", [line(n, acc=1.0) for n in range(7)], "acc")
    evaluated(run.root, "validation_text", [line(0, acc=1.0)], "acc")
    searched(run)
    known = read_overlaps(run, _STATE)
    assert known
    assert known.unscanned == ["quiz (3 items)", "unseen"]
    assert lacks(run, 100, "unseen")
    assert not lacks(run, 100, "quiz")
    assert not lacks(run, 200, "quiz"), "nothing was scanned up to this milestone"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"tasks": {"quiz": {}}}', '{"tasks": {"quiz": 1}}', "\0"])
def test_a_damaged_result_counts_as_none(run: RunPaths, content: str) -> None:
    files.write_text(run.contamination(100) / "scan" / "result.json", content)
    assert read_overlaps(run, RunState(milestones={100: MILESTONE})) is None
    assert in_corpus(run, 100, "quiz") == {}


def test_an_item_says_what_is_in_the_corpus_and_where(run: RunPaths) -> None:
    searched(run, {"0": found(7, 10)})
    assert in_corpus(run, 100, "other") == {}
    assert in_corpus(run, 100, "quiz") == {"0": "7 of 10 n-grams, such as 'to be or not to be' (hamlet\x1b.txt:3)"}
