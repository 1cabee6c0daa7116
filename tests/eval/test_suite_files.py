"""The suites of ``conf/eval`` name tasks that the harness has, with their shots, metrics and judges."""

from __future__ import annotations

import pytest

from conf.compose import compose
from eval import plan


@pytest.mark.parametrize(
    ("suite", "tasks", "shots"),
    [
        ("early", ["hellaswag", "piqa", "arc_easy", "sciq", "lambada_openai"], {0}),
        ("code", ["humaneval", "mbpp"], {0, 3}),
    ],
)
def test_a_suite_asks_for_its_tasks(suite: str, tasks: list[str], shots: set[int]) -> None:
    wanted = compose([f"eval={suite}"]).eval
    asked, figures = plan.ask(wanted)
    assert (wanted.suite, figures) == (suite, [])
    assert [one.definition.name for one in asked] == tasks
    assert {one.shots for one in asked} == shots


def test_the_programs_of_the_code_suite_are_tested_by_the_right_judge() -> None:
    asked, _ = plan.ask(compose(["eval=code"]).eval)
    assert {one.definition.name: one.settings.judge for one in asked} == {"humaneval": "human_eval", "mbpp": "mbpp"}
    mbpp = plan.required_splits(asked[1])
    assert [split.places for split in mbpp] == [("mbpp/full/test.jsonl", "mbpp/full.jsonl")]


def test_the_tasks_of_olmes_have_five_shots() -> None:
    asked, figures = plan.ask(compose(["eval=olmes_tasks"]).eval)
    names = [one.definition.name for one in asked]
    others = [name for name in names if not name.startswith("mmlu_")]
    nine = "arc_challenge arc_easy boolq commonsense_qa hellaswag openbookqa piqa social_iqa winogrande"
    assert " ".join(others) == nine
    assert len(names) == 57 + len(others)
    assert {one.shots for one in asked} == {5}
    assert "mmlu" in {figure.group.name for figure in figures}
