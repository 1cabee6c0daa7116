"""The scores equal those of the harness itself, for a task of each kind, from files and without a network."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.compose import compose
from conf.schema import EvalConfig, EvalGroupConfig
from eval import harness
from eval.serving import model, runners
from eval.tasks import plan, suites
from eval.tasks.suites import Task
from hlatctl.run.errors import ConfigError, EvaluationError

_WHOLE = compose(["eval=hlat"]).eval
#: The harness's own default, 256 tokens, would leave no room for a prompt in the tiny model's context.
_GENERATION = {"max_gen_toks": 64}
_REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval"
needs_real_data = pytest.mark.skipif(not _REAL.is_dir(), reason="the datasets are not here")


def _tasks(data_dir: Path, scratch: Path, *names: str, wanted: EvalConfig = _WHOLE) -> list[Task]:
    return plan.make(replace(wanted, data_dir=str(data_dir), tasks=list(names)), scratch).tasks


def _simple_evaluate(
    model_folder: Path,
    folder: Path,
    definition: dict[str, Any],
    *,
    shots: int | None,
    limit: float | None,
    generation: dict[str, Any] = _GENERATION,
    **others: Any,
) -> dict[str, Any]:
    """Evaluate the same task as a user of the harness does, on a model that it loads itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder.mkdir()
    (folder / "direct.yaml").write_text(yaml.safe_dump({**definition, "task": "direct"}), encoding="utf-8")
    result: dict[str, Any] = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model_folder), "dtype": "float32"},
        tasks=["direct"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=4,
        num_fewshot=shots,
        limit=limit,
        gen_kwargs=dict(generation),
        **{"random_seed": 7, "numpy_random_seed": 7, "torch_random_seed": 7, "fewshot_random_seed": 7, **others},
    )
    return result


def _assert_same(ours: harness.TaskResult, direct: dict[str, Any]) -> None:
    expected = direct["results"]["direct"]
    numbers = {key: value for key, value in expected.items() if isinstance(value, float)}
    assert len(numbers) >= 2
    # The harness computes the logits of all tokens, which some processors sum in another order (eval.serving.scoring).
    assert {key: ours.metrics[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-6)
    for mine, theirs in zip(ours.samples, direct["samples"]["direct"], strict=True):
        assert mine["arguments"] == theirs["arguments"]
        for answer, their_answer in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
            if isinstance(their_answer, str):
                assert answer == their_answer
            else:
                (nats, is_greedy), (their_nats, theirs_is_greedy) = answer, their_answer
                assert (nats, is_greedy) == (pytest.approx(their_nats, rel=1e-5, abs=1e-5), theirs_is_greedy)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "splits", "shots"),
    [
        ("mmlu_anatomy", {"test": "mmlu/anatomy/test", "dev": "mmlu/anatomy/dev"}, 5),
        ("gsm8k", {"test": "gsm8k/test", "train": "gsm8k/train"}, 2),
        ("crows_pairs_english_gender", {"test": "crows_pairs/test"}, 0),
    ],
)
def test_the_numbers_are_those_of_the_harness_itself(
    lm: object, model_folder: Path, tiny_data: Path, tmp_path: Path, name: str, splits: dict[str, str], shots: int
) -> None:
    """Multiple choice, generation and pairs; the stock definition pointed at the files by hand."""
    (task,) = _tasks(tiny_data, tmp_path, name)
    ours = harness.run(lm, replace(task, shots=shots), tmp_path, limit=3, seed=7, generation=_GENERATION)
    files = {split: str(tiny_data / f"{file}.jsonl") for split, file in splits.items()}
    by_hand = {
        "include": str(task.definition),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")},
    }
    direct = _simple_evaluate(model_folder, tmp_path / "direct", by_hand, shots=shots, limit=3)
    _assert_same(ours, direct)
    assert next(iter(ours.scores.values())).n == 3


@pytest.mark.processes
def test_the_numbers_in_a_conversation_about_chosen_items_are_those_of_the_harness_too(
    chat_folder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """``--apply_chat_template --system_instruction --samples --gen_kwargs --seed 7,7,7,3`` of its command line."""
    generation = {"max_gen_toks": 16, "repetition_penalty": 1.3, "until": ["Q"]}
    group = EvalGroupConfig(tasks=["gsm8k"], shots=2, metrics=["exact_match"], generation=generation)
    wanted = EvalConfig(
        groups={"math": group},
        data_dir=str(tiny_data),
        chat_template=True,
        system_prompt="Be brief.",
        items={"gsm8k": [3, 1]},
        fewshot_seed=3,
    )
    (task,) = plan.make(wanted, tmp_path).tasks
    chatting = model.load(chat_folder, seq_len=256, device="cpu")
    request = runners.RunnerArguments(folder=chat_folder, loaded=lambda: chatting, max_length=256, batch_size=4, seed=7)
    ours = harness.run(runners.make("hf", request), task, tmp_path, seed=7, limit=1)
    prompt = ours.samples[0]["arguments"][0][0]
    assert prompt.startswith("<system>Be brief.\n<user>")
    assert prompt.count("<user>") == prompt.count("<assistant>") == 3
    files = {split: str(tiny_data / f"gsm8k/{split}.jsonl") for split in ("test", "train")}
    by_hand = {
        "include": str(task.definition),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")},
    }
    direct = _simple_evaluate(
        chat_folder,
        tmp_path / "direct",
        by_hand,
        shots=2,
        limit=None,
        generation=generation,
        samples={"direct": [1, 3]},
        apply_chat_template=True,
        system_instruction="Be brief.",
        fewshot_as_multiturn=True,
        fewshot_random_seed=3,
    )
    _assert_same(ours, direct)
    assert [sample["doc_id"] for sample in ours.samples[:2]] == [1, 3]
    assert ours.scores["gsm8k"].n == 2


def test_a_fraction_is_rounded_up_to_whole_items(lm: object, tiny_data: Path, tmp_path: Path) -> None:
    (task,) = _tasks(tiny_data, tmp_path, "mmlu_anatomy")
    counts = [harness.run(lm, task, tmp_path, seed=1, limit=limit).scores["mmlu_anatomy"].n for limit in (0.1, 0.4, 1)]
    assert counts == [1, 3, 1]


def test_a_chosen_item_that_does_not_exist_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    (task,) = _tasks(tiny_data, tmp_path, "mmlu_anatomy", wanted=replace(_WHOLE, items={"mmlu_anatomy": [0, 6]}))
    with pytest.raises(ConfigError) as caught:
        harness.render(task, tmp_path, seed=1)
    assert str(caught.value) == (
        "eval.items.mmlu_anatomy: item 6 does not exist\nhint: mmlu_anatomy has 6 items, from 0 to 5"
    )


@pytest.mark.processes
def test_the_numbers_of_a_built_in_task_are_too(lm: object, model_folder: Path, tmp_path: Path) -> None:
    task = suites.task("smoke", "smoke_mmlu")
    ours = harness.run(lm, task, tmp_path, limit=12, seed=7)
    definition = yaml.safe_load(task.definition.read_text(encoding="utf-8"))
    definition |= {"dataset_kwargs": {"data_files": {"test": str(task.items)}, "cache_dir": str(tmp_path / "cache")}}
    _assert_same(ours, _simple_evaluate(model_folder, tmp_path / "direct", definition, shots=None, limit=12))


def test_a_tiny_file_is_enough_for_every_task_of_the_table(lm: object, tiny_data: Path, tmp_path: Path) -> None:
    names = "mmlu_virology leaderboard_bbh_navigate gsm8k commonsense world_knowledge reading truthfulness"
    results = {
        task.name: harness.run(lm, task, tmp_path, seed=1).scores
        for task in _tasks(tiny_data, tmp_path, *names.split())
    }
    sizes = {name: scores[name].n for name, scores in results.items()}
    assert sizes == {
        "mmlu_virology": 3,
        "leaderboard_bbh_navigate": 3,
        "gsm8k": 4,
        "piqa": 2,
        "hellaswag": 3,
        "winogrande": 2,
        "arc_easy": 2,
        "arc_challenge": 1,
        "openbookqa": 2,
        "nq_open": 8,
        "triviaqa": 3,
        "boolq": 2,
        "truthfulqa_mc1": 2,
        "truthfulqa_mc2": 2,
    }
    assert list(results["hellaswag"]) == ["hellaswag", "hellaswag_acc_norm", "hellaswag_bpb"]
    assert list(results["gsm8k"]) == ["gsm8k", "gsm8k_flexible_extract", "gsm8k_bpb"]
    assert list(results["winogrande"]) == ["winogrande", "winogrande_bpb"]
    without_bits = {name for name, scores in results.items() if f"{name}_bpb" not in scores}
    assert without_bits == {"truthfulqa_mc2"}, "its definition has a function of its own"
    assert all(0 < scores[f"{name}_bpb"].value < 100 for name, scores in results.items() if name not in without_bits)
    chances = {name: scores[name].chance for name, scores in results.items()}
    assert chances == pytest.approx(
        {
            **dict.fromkeys(("mmlu_virology", "hellaswag", "arc_challenge", "openbookqa"), 0.25),
            **dict.fromkeys(("leaderboard_bbh_navigate", "piqa", "winogrande", "boolq"), 0.5),
            **dict.fromkeys(("gsm8k", "nq_open", "triviaqa"), 0.0),
            "arc_easy": (1 / 4 + 1 / 3) / 2,
            "truthfulqa_mc1": 1 / 3,
            "truthfulqa_mc2": None,
        }
    )
    from lm_eval import utils as lm_eval_utils

    compiled = lm_eval_utils.env.from_string.cache_info()
    assert compiled.hits > compiled.misses, "the harness compiles a template for every example"


def test_a_category_of_crows_pairs_holds_its_own_pairs_only(lm: object, tiny_data: Path, tmp_path: Path) -> None:
    tasks = _tasks(tiny_data, tmp_path, "crows_pairs_english", "crows_pairs_english_age")
    whole, age = (harness.run(lm, task, tmp_path, seed=1) for task in tasks)
    assert whole.scores["crows_pairs_english"].n == 27
    assert {sample["doc"]["bias_type"] for sample in age.samples} == {"age"}
    assert age.scores["crows_pairs_english_age"].metric == "pct_stereotype"


def test_a_question_is_never_among_its_own_solved_examples(lm: object, tiny_data: Path, tmp_path: Path) -> None:
    (task,) = _tasks(tiny_data, tmp_path, "nq_open")
    samples = harness.run(lm, task, tmp_path, seed=1).samples
    for sample in samples:
        prompt, question = sample["arguments"][0][0], f"Q: {sample['doc']['question']}?"
        assert (prompt.count("\nQ: "), prompt.count(question)) == (6, 1)


def test_groups_are_the_harness_own_figures(model_folder: Path, lm: object, tiny_data: Path, tmp_path: Path) -> None:
    """Weighted by items for MMLU; the plain mean for a group of the suite."""
    planned = plan.make(replace(_WHOLE, data_dir=str(tiny_data), tasks=["commonsense"]), tmp_path)
    metrics = {
        "a": {"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 100},
        "b": {"acc,none": 0.2, "acc_stderr,none": 0.2, "sample_len": 50},
    }

    def figure(*, weighted: bool) -> Any:
        aggregate = [{"metric": "acc", "weight_by_size": weighted}]
        group = replace(planned.figures[0].group, name="both", tasks=("a", "b"), aggregate=aggregate)
        return harness.figure(plan.Figure(group=group, metrics=("acc", "acc_norm")), metrics)["both"]

    weighted, plain = figure(weighted=True), figure(weighted=False)
    assert (weighted.value, weighted.n) == (pytest.approx((0.5 * 100 + 0.2 * 50) / 150), 150)
    assert plain.value == pytest.approx(0.35)
    assert plain.stderr == pytest.approx(math.hypot(0.1, 0.2) / 2)
    results = {task.name: harness.run(lm, task, tmp_path, seed=1).metrics for task in planned.tasks}
    scores = harness.figure(planned.figures[0], results)
    accuracies = [metrics["acc,none"] for metrics in results.values()]
    assert scores["commonsense"].value == pytest.approx(sum(accuracies) / 6)
    normalised = [metrics["acc_norm,none"] for metrics in results.values() if "acc_norm,none" in metrics]
    assert len(normalised) == 5
    assert scores["commonsense_acc_norm"].value == pytest.approx(sum(normalised) / 5)
    bits = [metrics["bits_per_byte,none"] for metrics in results.values()]
    assert scores["commonsense_bpb"].value == pytest.approx(sum(bits) / 6)
    assert scores["commonsense"].chance == pytest.approx((0.5 + 0.25 + 0.5 + (1 / 4 + 1 / 3) / 2 + 0.25 + 0.25) / 6)
    del results["piqa"]["bits_per_byte,none"]
    assert "commonsense_bpb" not in harness.figure(planned.figures[0], results), "a mean of the rest is another score"


def test_more_tokens_than_the_context_holds_are_not_asked_for(lm: object, tmp_path: Path) -> None:
    """The definition of HumanEval asks for 1,024 tokens; this model's context is 256."""
    (task,) = plan.make(EvalConfig(tasks=["humaneval"]), tmp_path).tasks
    result = harness.run(lm, task, tmp_path, limit=1, seed=1)
    assert result.samples[0]["arguments"][0][1]["max_gen_toks"] == 128
    assert list(result.scores) == ["humaneval_bpb"]


def test_items_that_are_not_the_task_s_are_an_error_that_names_the_file(
    lm: object, tiny_data: Path, tmp_path: Path
) -> None:
    path = tiny_data / "piqa" / "validation.jsonl"
    path.write_text('{"question": "no goal here", "label": 0}\n', encoding="utf-8")
    (task,) = _tasks(tiny_data, tmp_path, "piqa")
    with pytest.raises(EvaluationError, match=r"piqa: can't be loaded from .*piqa/validation\.jsonl \("):
        harness.run(lm, task, tmp_path, seed=1)


def test_a_metric_that_the_task_lacks_is_an_error_with_those_it_has(
    lm: object, tiny_data: Path, tmp_path: Path
) -> None:
    (task,) = _tasks(tiny_data, tmp_path, "winogrande")
    with pytest.raises(ConfigError, match=r"winogrande has none of the metrics f1\nhint: it has acc,none"):
        harness.run(lm, replace(task, metrics=("f1",)), tmp_path, seed=1)


def test_without_metrics_of_a_suite_the_definition_s_first_one_counts(
    lm: object, tiny_data: Path, tmp_path: Path
) -> None:
    for name, metric, others in (
        ("piqa", "acc", {"piqa_bpb": "bits_per_byte"}),
        ("crows_pairs_english", "likelihood_diff", {}),
    ):
        (task,) = _tasks(tiny_data, tmp_path, name, wanted=EvalConfig())
        scores = harness.run(lm, task, tmp_path, limit=2, seed=1).scores
        assert {key: score.metric for key, score in scores.items()} == {name: metric, **others}


def test_prompts_fit_a_context_of_512_tokens_of_two_letters(lm: object, tmp_path: Path) -> None:
    for name in ("smoke_mmlu", "smoke_bbh", "smoke_gsm8k"):
        result = harness.run(lm, suites.task("smoke", name), tmp_path, limit=40, seed=1)
        assert max(len(sample["arguments"][0][0]) for sample in result.samples) < 2 * (512 - 64), name


def test_the_primary_score_is_the_first_metric_under_the_first_filter(lm: object, tmp_path: Path) -> None:
    primary = {}
    for name in ("smoke_bbh", "smoke_crows_pairs", "smoke_gsm8k", "smoke_mmlu"):
        result = harness.run(lm, suites.task("smoke", name), tmp_path, limit=3, seed=1)
        primary[name] = (result.scores[name].metric, result.scores[name].n)
    assert primary == {
        "smoke_bbh": ("acc_norm", 3),
        "smoke_crows_pairs": ("pct_stereotype", 3),
        "smoke_gsm8k": ("exact_match", 3),
        "smoke_mmlu": ("acc", 3),
    }


def test_a_task_of_one_item_has_no_standard_error(lm: object, tmp_path: Path) -> None:
    score = harness.run(lm, suites.task("smoke", "smoke_mmlu"), tmp_path, limit=1, seed=1).scores["smoke_mmlu"]
    assert (score.n, score.stderr) == (1, None)


def test_the_items_answers_are_right_by_the_harness_own_metric(tmp_path: Path) -> None:
    """A model that answered each question of arithmetic with its own solution would score 1."""
    task = suites.task("smoke", "smoke_gsm8k")
    loaded_task = harness.load(task, tmp_path, shots=None, seed=1)["tasks"]["smoke_gsm8k"]
    for line in task.items.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        assert loaded_task.process_results(item, [item["answer"].split("#### ")[1]]) == {"exact_match": 1.0}
        assert loaded_task.process_results(item, ["0"]) == {"exact_match": 0.0}


def test_nothing_is_written_outside_of_the_scratch_folder(
    lm: object, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    before = sorted(tiny_data.rglob("*"))
    (task,) = _tasks(tiny_data, tmp_path, "hellaswag")
    harness.run(lm, task, tmp_path, limit=2, seed=1)
    assert list(home.iterdir()) == []
    assert sorted(tiny_data.rglob("*")) == before
    assert (tmp_path / "datasets").is_dir()


@needs_real_data
@pytest.mark.parametrize(
    ("name", "items"),
    [
        ("gsm8k", 1319),
        ("piqa", 1838),
        ("nq_open", 3610),
        ("boolq", 3270),
        ("hellaswag", 10_042),
        ("crows_pairs_english", 1508),
        ("mmlu_anatomy", 135),
        ("bbh_cot_fewshot_word_sorting", 250),
    ],
)
def test_the_real_datasets_are_loaded_whole(name: str, items: int, tmp_path: Path) -> None:
    (task,) = _tasks(_REAL, tmp_path, name)
    loaded = harness.load(task, tmp_path, shots=task.shots, seed=1)["tasks"][name]
    assert len(loaded.eval_docs) == items
    shutil.rmtree(tmp_path / "datasets")


@needs_real_data
def test_the_real_items_run(lm: object, tmp_path: Path) -> None:
    tasks = _tasks(
        _REAL, tmp_path, "mmlu_anatomy", "leaderboard_bbh_navigate", "crows_pairs_english", "piqa", "nq_open"
    )
    for task in tasks:
        assert harness.run(lm, task, tmp_path, limit=2, seed=1).scores[task.name].n == 2, task.name
