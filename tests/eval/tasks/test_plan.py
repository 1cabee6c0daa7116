"""A suite becomes tasks with files, or an error before anything runs."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import EvalConfig
from eval import check
from eval.tasks import data_files, plan
from eval.tasks.catalog import Catalog
from hlatctl.run.errors import ConfigError, DataError, DependencyError

_WHOLE = compose(["eval=hlat"]).eval


def _make(wanted: EvalConfig, tmp_path: Path, *tasks: str) -> plan.EvaluationPlan:
    return plan.make(replace(wanted, tasks=list(tasks)), tmp_path)


def test_the_whole_table_is_expanded_by_the_harness_own_groups() -> None:
    asked, figures = plan.ask(_WHOLE)
    names = [one.definition.name for one in asked]
    assert sum(name.startswith("mmlu_") for name in names) == 57
    assert sum(name.startswith("leaderboard_bbh_") for name in names) == 24
    others = [name for name in names if not name.startswith(("mmlu_", "leaderboard_", "crows_pairs_"))]
    assert " ".join(others) == (
        "gsm8k humaneval piqa hellaswag winogrande arc_easy arc_challenge openbookqa nq_open triviaqa boolq "
        "truthfulqa_mc1 truthfulqa_mc2"
    )
    assert sum(name.startswith("crows_pairs_english_") for name in names) == 9
    assert {figure.group.name: len(figure.group.tasks) for figure in figures} == {
        "mmlu_stem": 19,
        "mmlu_other": 13,
        "mmlu_social_sciences": 12,
        "mmlu_humanities": 13,
        "mmlu": 57,
        "leaderboard_bbh": 24,
        "commonsense": 6,
        "world_knowledge": 2,
    }
    shots = {one.definition.name: one.shots for one in asked}
    some = ("mmlu_anatomy", "leaderboard_bbh_navigate", "gsm8k", "nq_open", "piqa")
    assert [shots[name] for name in some] == [5, 3, 8, 5, 0]


def test_the_core_is_part_of_the_whole_and_each_group_can_be_changed() -> None:
    core = compose(["eval=hlat_core", "eval.groups.math.shots=5", "~eval.groups.code"]).eval
    assert list(core.groups) == ["mmlu", "bbh", "math", "bias"]
    assert (core.suite, core.groups["math"].shots, core.groups["mmlu"]) == ("hlat_core", 5, _WHOLE.groups["mmlu"])


def test_a_task_of_the_suite_keeps_its_groups_shots_and_metrics_and_any_other_its_own(tmp_path: Path) -> None:
    tasks = _make(_WHOLE, tmp_path, "mmlu_anatomy", "gsm8k_cot", "truthfulness").tasks
    assert [(t.name, t.shots, t.metrics) for t in tasks] == [
        ("truthfulqa_mc1", 0, ("acc",)),
        ("truthfulqa_mc2", 0, ("acc",)),
        ("mmlu_anatomy", 5, ("acc",)),
        ("gsm8k_cot", None, ()),
    ]


def test_part_of_a_group_makes_the_figures_of_that_part_only(tmp_path: Path) -> None:
    planned = _make(_WHOLE, tmp_path, "mmlu_stem", "piqa")
    assert ([f.group.name for f in planned.figures], len(planned.tasks), planned.validation) == (
        ["mmlu_stem"],
        20,
        False,
    )


def test_a_definition_that_says_no_shots_keeps_none_as_on_the_harness_command_line() -> None:
    definition = Catalog(["truthfulqa_mc1"]).tasks("truthfulqa_mc1")[0]
    assert data_files.shot_count(definition, 5) == 0


def test_a_tag_stands_for_its_tasks_in_every_folder() -> None:
    names = [task.name for task in Catalog(["chain_of_thought"]).tasks("chain_of_thought")]
    assert {"gsm8k_cot", "gsm8k_platinum_cot", "asdiv_cot_llama"} < set(names)


def test_the_problems_of_humaneval_come_from_its_package_and_no_code_of_the_harness_is_named(tmp_path: Path) -> None:
    (task,) = _make(_WHOLE, tmp_path, "humaneval").tasks
    assert len(task.items.read_text(encoding="utf-8").splitlines()) == 164
    assert (task.judge, task.config["metric_list"][0]["metric"]) == ("human_eval", "bypass")
    assert task.config["generation_kwargs"]["until"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    assert "include" not in task.config
    (by_name,) = _make(EvalConfig(), tmp_path, "humaneval").tasks
    assert by_name.judge == "human_eval"


@pytest.mark.parametrize(
    ("wanted", "name", "message"),
    [
        (
            EvalConfig(),
            "smoke_mmul",
            "eval.tasks: smoke_mmul is no task or group of suite smoke, nor of lm-evaluation-harness\n"
            "hint: did you mean smoke_mmlu?",
        ),
        (_WHOLE, "hellaswg", "of suite hlat, nor of lm-evaluation-harness\nhint: did you mean hellaswag?"),
        (_WHOLE, "truthfullness", "did you mean truthfulness?"),
        (_WHOLE, "qqqqqqqq", "hint: `lm_eval ls tasks` lists the harness's tasks"),
        (
            _WHOLE,
            "mbpp_instruct",
            "eval.tasks: mbpp_instruct runs generated code in the harness, without a sandbox\n"
            "hint: remove mbpp_instruct; in the sandbox run humaneval and mbpp",
        ),
    ],
)
def test_a_task_that_can_not_be_run_is_refused(wanted: EvalConfig, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _make(wanted, tmp_path, name)
    assert message in str(caught.value)


def test_metrics_that_a_task_or_its_group_lacks_are_refused_before_anything_runs() -> None:
    chain_of_thought = "eval.groups.bbh.tasks=[bbh_cot_fewshot]"
    with pytest.raises(ConfigError) as caught:
        plan.ask(compose(["eval=hlat_core", chain_of_thought]).eval)
    assert str(caught.value) == (
        "eval.groups: bbh_cot_fewshot_boolean_expressions has none of the metrics acc_norm\nhint: it has exact_match"
    )
    asked, _ = plan.ask(
        compose(["eval=hlat", "eval.tasks=[piqa]", "eval.groups.commonsense.metrics=[acc_per_token]"]).eval
    )
    assert [one.settings.metrics for one in asked] == [["acc_per_token"]], "it follows from the same answers"
    asked, _ = plan.ask(compose(["eval=hlat_core", chain_of_thought, "eval.groups.bbh.metrics=[exact_match]"]).eval)
    assert sum(one.definition.name.startswith("bbh_cot_fewshot_") for one in asked) == 27


def test_settings_of_generation_are_for_tasks_that_generate() -> None:
    math, mmlu = ({f"eval.groups.{name}.generation={{max_gen_toks:9}}"} for name in ("math", "mmlu"))
    asked, _ = plan.ask(compose(["eval=hlat_core", *math]).eval)
    assert [one.definition.name for one in asked if one.settings.generation] == ["gsm8k"]
    with pytest.raises(ConfigError) as caught:
        plan.ask(compose(["eval=hlat_core", *mmlu]).eval)
    assert "has settings of generation, but generates no answers (multiple_choice)" in str(caught.value)


def test_chosen_items_are_of_tasks_that_are_evaluated(tmp_path: Path) -> None:
    wanted = EvalConfig(tasks=["smoke_mmlu"], items={"smoke_mmlu": [4, 1]})
    assert [task.chosen for task in plan.make(wanted, tmp_path).tasks] == [(1, 4)]
    with pytest.raises(ConfigError) as caught:
        plan.make(replace(wanted, items={"smoke_mmul": [1]}), tmp_path)
    assert str(caught.value) == (
        "eval.items.smoke_mmul: is no task of this evaluation\nhint: did you mean eval.items.smoke_mmlu?"
    )


def test_a_missing_dataset_is_named_with_its_place_and_the_command_that_helps(tiny_data: Path, tmp_path: Path) -> None:
    (tiny_data / "ai2_arc" / "ARC-Easy" / "test.jsonl").unlink()
    (tiny_data / "gsm8k" / "train.jsonl").unlink()
    wanted = replace(_WHOLE, data_dir=str(tiny_data))
    with pytest.raises(DataError) as caught:
        _make(wanted, tmp_path, "arc_easy", "gsm8k", "piqa")
    assert str(caught.value) == (
        f"eval.data_dir={tiny_data}: suite hlat, task arc_easy needs the split test of allenai/ai2_arc/ARC-Easy as "
        "ai2_arc/ARC-Easy/test.jsonl; 1 more tasks lack theirs\n"
        f"hint: with a network: hlatctl eval data download --to {tiny_data} eval=hlat; `hlatctl eval data status` "
        "lists the present files"
    )


def test_shots_without_a_named_split_may_come_from_the_evaluated_one_and_this_is_noted(
    tiny_data: Path, tmp_path: Path
) -> None:
    wanted = replace(_WHOLE, data_dir=str(tiny_data))
    assert _make(wanted, tmp_path, "triviaqa").notes == []
    planned = _make(wanted, tmp_path, "nq_open")
    assert planned.notes == ["nq_open: nq_open/train.jsonl is missing; its solved examples come from validation"]
    (task,) = planned.tasks
    splits = [task.config[f"{kind}_split"] for kind in ("test", "fewshot", "training")]
    assert splits == ["validation", "validation", None]


@pytest.mark.parametrize(
    ("dataset", "config", "split", "single", "places"),
    [
        ("cais/mmlu", "anatomy", "dev", False, ("mmlu/anatomy/dev.jsonl",)),
        ("SaylorTwift/bbh", "navigate", "test", True, ("bbh/navigate/test.jsonl", "bbh/navigate.jsonl")),
        ("openai/gsm8k", "main", "test", False, ("gsm8k/main/test.jsonl", "gsm8k/test.jsonl")),
        ("baber/piqa", None, "validation", False, ("piqa/validation.jsonl",)),
        ("aps/super_glue", "boolq", "validation", False, ("boolq/validation.jsonl",)),
        ("aps/super_glue", "cb", "validation", False, ("super_glue/cb/validation.jsonl",)),
        ("jannalu/crows_pairs_multilingual", "english", "test", True, ("crows_pairs/test.jsonl",)),
        (
            "jannalu/crows_pairs_multilingual",
            "french",
            "test",
            True,
            ("crows_pairs_multilingual/french/test.jsonl", "crows_pairs_multilingual/french.jsonl"),
        ),
    ],
)
def test_where_a_split_may_lie(
    dataset: str, config: str | None, split: str, single: bool, places: tuple[str, ...]
) -> None:
    assert data_files._places(dataset, config, split, single=single) == places


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (EvalConfig(), False),
        (EvalConfig(tasks=["validation", "smoke_mmlu"]), False),
        (EvalConfig(tasks=["gsm8k"]), True),
        (EvalConfig(tasks=["gsm8k"], data_dir="/data"), False),
        (_WHOLE, True),
        (replace(_WHOLE, data_dir="/data"), False),
    ],
)
def test_the_network_is_for_datasets_of_the_hub_only(wanted: EvalConfig, expected: bool) -> None:
    assert plan.uses_network(wanted) is expected


def test_a_dataset_that_code_creates_can_not_be_a_file(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ruler_cwe creates its dataset itself, so it can't be in eval\.data_dir"):
        _make(EvalConfig(data_dir=str(tiny_data)), tmp_path, "ruler_cwe")


@pytest.mark.parametrize(("runner", "package"), [("vllm", "vllm"), ("neuron", r"optimum\.neuron")])
def test_a_runner_whose_package_is_missing_is_refused_by_the_check(runner: str, package: str, tmp_path: Path) -> None:
    from conf.load import dump

    file = tmp_path / "config.yaml"
    file.write_text(dump(compose([f"eval.runner={runner}"])), encoding="utf-8")
    with pytest.raises(DependencyError, match=f"eval.runner={runner}: the package {package} is not installed"):
        check.main(["--config", str(file)])


def test_the_check_passes_where_everything_is_there(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from conf.load import dump

    file = tmp_path / "config.yaml"
    overrides = ["eval=hlat", f"eval.data_dir={tiny_data}", "eval.tasks=[commonsense,nq_open,code]"]
    file.write_text(dump(compose(overrides)), encoding="utf-8")
    assert check.main(["--config", str(file)]) == 0
    assert capsys.readouterr().err == (
        "nq_open: nq_open/train.jsonl is missing; its solved examples come from validation\n"
    )


def test_the_tiny_files_are_json_lines(tiny_data: Path) -> None:
    for path in tiny_data.rglob("*.jsonl"):
        assert all(isinstance(json.loads(line), dict) for line in path.read_text(encoding="utf-8").splitlines()), path


@pytest.mark.parametrize("damaged", [False, True])
def test_packed_problems_that_unpack_to_too_much_or_are_damaged_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    monkeypatch.setattr(plan, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b"x" * 1001)[: 10 if damaged else None])
    with pytest.raises(DataError, match="can't be unpacked" if damaged else "unpacks to more than"):
        plan.unpack(path)
