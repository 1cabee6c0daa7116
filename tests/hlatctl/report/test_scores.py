"""A run's scores over its milestones, compared with published ones, and accuracies by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hlatctl.report import baselines
from hlatctl.report.compare import Measured, RunScores
from hlatctl.report.contracts import Conditions, Known
from hlatctl.report.scores import courses_of, with_variants
from hlatctl.report.signals import signals
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState

PUBLISHED = baselines.load("hlat")


def scored(tokens: int, contract: str = "a", **values: float) -> RunScores:
    scores = {
        name: Measured(
            metric="acc", value=value, stderr=0.01, n=100, known=Known(key=contract, conditions=Conditions(shots=5))
        )
        for name, value in values.items()
    }
    return RunScores(run_id="r", tokens=tokens, step=tokens, simulated=False, scores=scores)


def test_a_row_has_the_points_of_all_milestones_and_published_models() -> None:
    (course,) = courses_of([scored(1, mmlu=0.3), scored(2, mmlu=0.4)], PUBLISHED).courses
    assert [(tokens, cell.value) for tokens, cell in course.points] == [(1, 30.0), (2, 40.0)]
    assert course.title == "MMLU (5-shot accuracy)"
    assert course.published["HLAT-7B"].value == 41.318
    assert course.differs, "the published number of items is unknown, and the run's contract was not recorded"


def test_scores_under_another_contract_than_the_first_are_no_points() -> None:
    (course,) = courses_of([scored(1, mmlu=0.3), scored(2, "b", mmlu=0.4)], PUBLISHED).courses
    assert [tokens for tokens, _ in course.points] == [1]


def test_the_table_has_only_rows_of_the_run_and_models_with_such_rows() -> None:
    found = courses_of([scored(1, mmlu=0.3, my_task=0.5)], PUBLISHED)
    assert found.table is not None
    assert {row.group for row in found.table.rows} == {"MMLU", "my_task"}
    assert "HLAT-7B" in [column.name for column in found.table.columns]
    alone = courses_of([scored(1, my_task=0.5)], PUBLISHED).table
    assert alone is not None
    assert [column.name for column in alone.columns] == ["r"]


def test_a_run_without_scores_has_neither_rows_nor_table() -> None:
    assert courses_of([], PUBLISHED).table is None


_METRICS = {"acc,none": 0.3, "acc_norm,none": 0.4, "acc_norm_stderr,none": 0.02, "acc_norm_chance,none": 0.25}


def milestone(run: RunPaths, metrics: Any) -> MilestoneState:
    found = MilestoneState(milestone_tokens=100, step=1, status="evaluated")
    found.scores = {name: {"metric": "acc", "value": 0.3, "stderr": 0.02} for name in ("piqa", "mmlu", "piqa_bpb")}
    path = run.eval(100) / "tasks" / "piqa.json"
    files.write_json(path, metrics)
    return found


def test_a_task_has_its_other_accuracies_with_errors_and_guessing(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "one")
    found = with_variants(run, milestone(run, {"metrics": _METRICS}))
    assert list(found.scores) == ["piqa", "mmlu", "piqa_bpb", "piqa_acc_norm"], "acc is the score itself"
    assert found.scores["piqa_acc_norm"] == {"metric": "acc_norm", "value": 0.4, "stderr": 0.02, "chance": 0.25}
    rows = signals([found], variants=True)
    assert [row.task for row in rows] == ["piqa", "piqa_acc_norm", "piqa_bpb", "mmlu"]
    assert rows[1].above == pytest.approx(0.15 / 0.02)
    assert [row.task for row in signals([found])] == ["piqa", "piqa_bpb", "mmlu"]


@pytest.mark.parametrize("record", [{}, {"metrics": None}, {"metrics": ["acc_norm,none"]}, []])
def test_a_file_without_metrics_adds_nothing(tmp_path: Path, record: Any) -> None:
    run = RunPaths(tmp_path / "one")
    asked = milestone(run, record)
    assert with_variants(run, asked).scores == asked.scores
    (run.eval(100) / "tasks" / "piqa.json").write_text("{", encoding="utf-8")
    assert with_variants(run, asked).scores == asked.scores
