from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import EvalConfig
from eval import harness
from eval.serving.answers import Encoded
from eval.tasks import catalog, core, plan
from hlatctl.plan.evaluation import evaluation_cost
from hlatctl.report import baselines
from hlatctl.run.errors import ConfigError, DataError
from tests.eval import tiny_data

_SUITE = compose(["eval=core"])


class _Letters:
    """A tokenizer with a token for each character, and a context."""

    def __init__(self, max_length: int = 10_000) -> None:
        self.max_length, self.prefix_token_id = max_length, 1
        self.tokenizer = SimpleNamespace(eos_token_id=2)

    def tok_encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tiny_data.write_bundle(tmp_path / "data")


@pytest.fixture
def load(tmp_path: Path, bundle: Path) -> Callable[..., Any]:
    """Return a function that loads a task of CORE; keyword arguments are keys of the section ``eval``."""

    def load(label: str, *, lm: Any = None, **keys: Any) -> Any:
        name = f"core_{label}"
        wanted = replace(_SUITE.eval, data_dir=str(bundle), tasks=[name], **keys)
        (task,) = plan.make(wanted, tmp_path).tasks
        loaded = harness.load(task, tmp_path, shots=task.shots, seed=1)["tasks"][name]
        if lm:
            loaded.read_with(lm, is_trained_here=True)
        return loaded

    return load


def _requests(loaded: Any, item: int) -> list[tuple[str, Any]]:
    return [request.args for request in loaded.construct_requests(loaded.test_docs()[item], "", metadata=("", item, 1))]


def _scored(request: tuple[str, Any]) -> str:
    assert isinstance(request[1], Encoded)
    _, answer = request[1].tokens
    return "".join(map(chr, answer))


def _finished(loaded: Any, answers: list[tuple[float, bool]]) -> dict[str, float]:
    """Return the scores of the first item with these log-likelihoods."""
    loaded.build_all_requests(limit=1)
    for request, answer in zip(loaded.instances, answers, strict=True):
        request.resps = [answer]
    loaded.apply_filters()
    results = [request.filtered_resps["none"] for request in loaded.instances]
    scores: dict[str, float] = loaded.process_results(loaded.test_docs()[0], results)
    return scores


def test_the_suite_has_the_22_tasks_and_the_harness_none_of_their_names() -> None:
    (group,) = _SUITE.eval.groups.values()
    assert (group.tasks, len(group.tasks)) == ([row.name for row in core.ROWS], 22)
    assert not set(core.TASKS) & (set(catalog.of_harness().defined) | set(catalog.of_harness().tags))


def test_the_group_s_score_is_first_and_every_task_has_a_row_and_a_planned_size() -> None:
    _, (figure,) = plan.ask(_SUITE.eval)
    assert (figure.group.name, figure.metrics) == ("core", ("centered", "acc"))
    ids = [row.id for row in baselines.layout().rows if row.group == "CORE"]
    assert ids == ["core", *core.TASKS]
    cost = evaluation_cost(_SUITE, None)
    assert (cost.unknown, cost.groups[0].group) == ([], "core")


def test_an_item_s_solved_examples_are_drawn_from_the_others_by_a_generator_of_its_own(
    load: Callable[..., Any], bundle: Path
) -> None:
    items = [json.loads(line) for line in (bundle / core.TASKS["core_piqa"].place).read_text().splitlines()]
    random.Random(1337).shuffle(items)
    others = [index for index in range(14) if index != 3]
    drawn = [items[index] for index in random.Random(1234 + 3).sample(others, 10)]
    solved = "".join(f"{item['query']}\nAnswer: {item['choices'][item['gold']]}\n\n" for item in drawn)
    loaded = load("piqa")
    assert [prompt for prompt, _ in _requests(loaded, 3)] == [f"{solved}{items[3]['query']}\nAnswer: "] * 3
    assert [answer for _, answer in _requests(loaded, 3)] == items[3]["choices"]


def test_a_limit_also_limits_the_items_that_examples_are_drawn_from(load: Callable[..., Any]) -> None:
    loaded = load("piqa", limit=12)
    first = [item["query"] for item in loaded.test_docs()[:12]]
    shown = [line for line in _requests(loaded, 0)[0][0].split("\n") if line.startswith("Question")]
    assert set(shown) <= set(first)
    with pytest.raises(ConfigError) as caught:
        _requests(load("piqa", limit=10), 0)
    assert str(caught.value) == (
        "core_piqa: shows 10 solved examples, which are drawn from the other evaluated items; there are 9\n"
        "hint: set eval.limit to 11 or more"
    )
    assert _requests(load("piqa", limit=2, items={"core_piqa": [1]}), 1), "chosen items replace the limit"


def test_the_scored_tokens_of_choices_begin_where_their_prompts_differ_also_within_a_word(
    load: Callable[..., Any],
) -> None:
    loaded = load("copa", lm=_Letters())
    item = next(item for item in loaded.test_docs() if item["query"] == "Question: 3 and 3?")
    assert [_scored(request) for request in _requests(loaded, item["index"])] == ["6 apples", "6 apricots", "3 pears"]
    loaded.test_docs()[0]["choices"] = ["6 apples", "6 apricots"]
    first = _requests(loaded, 0)
    assert [_scored(request) for request in first] == ["ples", "ricots"]
    assert first[0][1].tokens[0][:4] == [2, *map(ord, "Que")], "it begins as a document does"


def test_the_scored_tokens_of_a_schema_are_those_with_which_all_its_texts_end(load: Callable[..., Any]) -> None:
    loaded = load("winograd", lm=_Letters())
    assert [_scored(request) for request in _requests(loaded, 0)] == [" is happy."] * 2
    loaded.test_docs()[0]["context_options"] = ["Ann the", "Bob the"]
    assert [_scored(request) for request in _requests(loaded, 0)] == [" the is happy."] * 2


def test_a_continuation_is_scored_with_the_white_space_before_it(load: Callable[..., Any]) -> None:
    loaded = load("lambada_openai", lm=_Letters())
    (request,) = _requests(loaded, 0)
    item = loaded.test_docs()[0]
    assert request == (item["context"].strip(), f" {item['continuation']}")
    assert _scored(request) == f" {item['continuation']}"


def test_a_text_that_is_too_long_loses_its_beginning(load: Callable[..., Any]) -> None:
    (short,) = _requests(load("jeopardy", lm=_Letters(max_length=40)), 0)
    (whole,) = _requests(load("jeopardy", lm=_Letters()), 0)
    assert sum(map(len, short[1].tokens)) == 40
    assert short[1].tokens[1] == whole[1].tokens[1]
    (shortest,) = _requests(load("jeopardy", lm=_Letters(max_length=2)), 0)
    assert (list(map(len, shortest[1].tokens)), shortest[1].scored) == ([1, 1], 1)


def test_the_choice_with_the_lowest_loss_a_token_is_chosen(load: Callable[..., Any]) -> None:
    loaded = load("openbook_qa", lm=_Letters())
    gold, choices = loaded.test_docs()[0]["gold"], loaded.test_docs()[0]["choices"]
    nats = [(-2.0 * len(choice), False) for choice in choices]
    nats[gold] = (-1.9 * len(choices[gold]), False)
    assert _finished(loaded, nats) == {"centered": 1.0, "acc": 1.0}
    nats[gold] = (-2.1 * len(choices[gold]), False)
    assert _finished(loaded, nats) == pytest.approx({"centered": -1 / 3, "acc": 0.0})


def test_a_choice_without_tokens_of_its_own_has_no_loss_and_the_first_one_decides(load: Callable[..., Any]) -> None:
    loaded = load("openbook_qa", lm=_Letters())
    loaded.test_docs()[0].update(choices=["a", "ab"], gold=0)
    assert _finished(loaded, [(-9.0, False), (-1.0, False)])["acc"] == 1.0
    loaded.test_docs()[0].update(choices=["ab", "a"], gold=0)
    assert _finished(loaded, [(-9.0, False), (-1.0, False)])["acc"] == 1.0
    assert math.isnan(loaded.instances[1].filtered_resps["none"][0])


def test_a_continuation_is_right_if_each_token_is_the_likeliest(load: Callable[..., Any]) -> None:
    loaded = load("coqa", lm=_Letters())
    assert _finished(loaded, [(-9.0, True)]) == {"centered": 1.0, "acc": 1.0}
    assert _finished(loaded, [(-0.1, False)]) == {"centered": 0.0, "acc": 0.0}


def test_a_model_from_elsewhere_reads_its_own_first_token(load: Callable[..., Any]) -> None:
    loaded = load("coqa")
    loaded.read_with(_Letters(), is_trained_here=False)
    assert _requests(loaded, 0)[0][1].tokens[0][0] == 1


def test_missing_files_are_named_with_their_place(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(DataError) as caught:
        plan.make(_SUITE.eval, tmp_path)
    assert str(caught.value) == (
        "eval.data_dir=null: core_hellaswag_zeroshot reads "
        "eval_bundle/eval_data/language_understanding/hellaswag.jsonl, which is not on the Hugging Face Hub\n"
        "hint: run `hlatctl eval data download --to DIR eval=core`, then set eval.data_dir=DIR"
    )
    (bundle / core.TASKS["core_squad"].place).unlink()
    with pytest.raises(DataError) as caught:
        plan.make(replace(_SUITE.eval, data_dir=str(bundle)), tmp_path)
    assert "task core_squad needs the split test of eval_bundle/eval_data/reading_comprehension/squad" in str(
        caught.value
    )
    assert "as eval_bundle/eval_data/reading_comprehension/squad.jsonl\nhint:" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"query": "a", "choices": ["b"]}', "gold is missing"),
        ('{"query": "a", "choices": ["b"], "gold": 1}', "gold=1 is no place among 1 choices"),
        ('{"query": "a", "choices": ["b"], "gold": "0"}', "not supported between"),
        ("7", "is not iterable"),
    ],
)
def test_a_damaged_item_is_named_by_its_line(load: Callable[..., Any], bundle: Path, line: str, reason: str) -> None:
    path = bundle / core.TASKS["core_copa"].place
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        load("copa")
    assert f"{path}: line 15 is no item of the kind multiple_choice" in str(caught.value)
    assert reason in str(caught.value)


def test_a_bundle_that_describes_a_task_otherwise_is_refused(bundle: Path) -> None:
    folder = bundle / core.BUNDLE
    described = {
        "label": "piqa",
        "dataset_uri": core.TASKS["core_piqa"].file,
        "icl_task_type": "multiple_choice",
        "num_fewshot": [10],
        "continuation_delimiter": "\nAnswer: ",
    }
    (folder / core.CONFIG).write_text(json.dumps({"icl_tasks": [described]}))
    (folder / core.BASELINES).write_text("Eval Task,Random baseline\npiqa,50\nother,\n")
    core.check_bundle(bundle, core.TASKS)
    (folder / core.BASELINES).write_text("Eval Task,Random baseline\npiqa,25\n")
    with pytest.raises(DataError, match=r"eval_meta_data.csv: piqa is 25.0, and eval=core has 50.0"):
        core.check_bundle(bundle, core.TASKS)
    (folder / core.CONFIG).write_text(json.dumps({"icl_tasks": [{**described, "num_fewshot": [5]}]}))
    with pytest.raises(DataError, match=r"core.yaml: piqa is .*, 5, .* has .*, 10, "):
        core.check_bundle(bundle, core.TASKS)
    (folder / core.CONFIG).write_text("icl_tasks: [{")
    with pytest.raises(DataError, match=r"core.yaml or eval_meta_data.csv can't be read"):
        core.check_bundle(bundle, core.TASKS)


@pytest.mark.parametrize("key", [{"chat_template": True}, {"system_prompt": "Be brief."}])
def test_prompts_of_core_are_put_into_no_conversation(key: dict[str, Any]) -> None:
    wanted: EvalConfig = replace(_SUITE.eval, **key)
    with pytest.raises(ConfigError, match="core_hellaswag_zeroshot has the plain prompts of CORE"):
        plan.ask(wanted)
