"""The harness's numbers come out as the harness makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from eval import harness, suites
from eval.model import Loaded


@pytest.fixture
def lm(loaded: Loaded) -> object:
    return harness.wrap(loaded, batch_size=4)


@pytest.mark.parametrize("name", ["smoke_mmlu", "smoke_gsm8k"])
def test_the_numbers_are_those_of_simple_evaluate(lm: object, model_folder: Path, tmp_path: Path, name: str) -> None:
    """The same task, called as the harness's own users call it, on a model that it loads itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    ours = harness.run(lm, suites.task("smoke", name), tmp_path, limit=12, seed=1234)
    folder = tmp_path / "direct"
    folder.mkdir()
    task = suites.task("smoke", name)
    definition = yaml.safe_load(task.definition.read_text(encoding="utf-8"))
    definition |= {"task": "direct", "dataset_kwargs": {"data_files": {"test": str(task.items)},
                                                        "cache_dir": str(tmp_path / "cache")}}  # fmt: skip
    (folder / "direct.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
    direct = simple_evaluate(
        model="hf", model_args={"pretrained": str(model_folder), "dtype": "float32"}, tasks=["direct"], limit=12,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), device="cpu", batch_size=4,
    )  # fmt: skip
    expected = direct["results"]["direct"]
    numbers = [key for key, value in expected.items() if isinstance(value, float)]
    assert len(numbers) >= 2
    assert {key: ours.metrics[key] for key in numbers} == {key: expected[key] for key in numbers}
    for mine, theirs in zip(ours.samples, direct["samples"]["direct"], strict=True):
        assert mine["arguments"] == theirs["arguments"]
    score = ours.scores[name]
    assert (score.value, score.n) == (expected[numbers[0]], 12)


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


def test_the_items_answers_are_right_by_the_harness_own_metric(lm: object, tmp_path: Path) -> None:
    """A model that answered each question of arithmetic with its own solution would score 1."""
    from lm_eval.tasks import TaskManager

    task = suites.task("smoke", "smoke_gsm8k")
    loaded_task = TaskManager(include_defaults=False).load([str(harness._definition(task, tmp_path))])["tasks"][
        "smoke_gsm8k"
    ]
    for line in task.items.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        assert loaded_task.process_results(item, [item["answer"].split("#### ")[1]]) == {"exact_match": 1.0}
        assert loaded_task.process_results(item, ["0"]) == {"exact_match": 0.0}


def test_nothing_is_written_outside_of_the_scratch_folder(
    lm: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    harness.run(lm, suites.task("smoke", "smoke_bbh"), tmp_path, limit=2, seed=1)
    assert list(home.iterdir()) == []
    assert (tmp_path / "datasets").is_dir()
