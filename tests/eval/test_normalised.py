"""Metrics from log-likelihoods: bits per byte, accuracy by length, guessing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval import harness, normalised
from eval.normalised import Answers
from eval.tasks import suites

LM = SimpleNamespace(tok_encode=lambda text, add_special_tokens: text.split())


def task(choices: list[list[str]], right: list[Any], *, own: bool = False) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(output_type="multiple_choice", process_results=print if own else None),
        doc_to_choice=lambda doc: choices[doc],
        doc_to_target=lambda doc: right[doc],
        multiple_input=0,
    )


def samples(choices: list[list[str]], nats: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "doc_id": number,
            "doc": number,
            "filter": "none",
            "arguments": [("Q:", f" {text}") for text in texts],
            "filtered_resps": [(value, False) for value in values],
            "metrics": ["acc"],
            "acc": 0.0,
        }
        for number, (texts, values) in enumerate(zip(choices, nats, strict=True))
    ]


#: Of "a b c", "dddd" and "éé": 5, 4 and 2 characters; 5, 4 and 4 bytes; 3, 1 and 1 tokens.
CHOICES = [["a b c", "dddd", "éé"]]


def test_a_choice_is_chosen_by_its_nats_per_unit_of_its_length() -> None:
    nats, right = [[-3.5, -3.0, -2.5]], {"acc": 2, "acc_norm": 0, "acc_bytes": 2, "acc_per_token": 0}
    for name, choice in right.items():
        given = samples(CHOICES, nats)
        found = normalised.add(LM, task(CHOICES, [choice]), {}, given)
        assert found[f"{name},none"] == given[0][name] == 1.0, name
        assert given[0]["metrics"] == ["acc", "bits_per_byte", "acc", "acc_norm", "acc_bytes", "acc_per_token"]
        other = normalised.add(LM, task(CHOICES, [1]), {}, samples(CHOICES, nats))
        assert other[f"{name},none"] == 0.0


def test_metrics_of_the_harness_stay_and_choices_of_one_length_need_no_others() -> None:
    found = normalised.add(LM, task(CHOICES, [2]), {"acc,none": 0.7}, samples(CHOICES, [[-1.0, -2.0, -3.0]]))
    assert found["acc,none"] == 0.7
    letters = [["A", "B"]]
    given = samples(letters, [[-1.0, -2.0]])
    metrics = normalised.add(LM, task(letters, [0]), {"acc,none": 1.0}, given)
    assert set(metrics) == {"acc,none", "bits_per_byte,none", "acc_chance,none"}
    assert given[0]["metrics"] == ["acc", "bits_per_byte"]


def test_bits_per_byte_is_the_mean_over_items_with_its_standard_error() -> None:
    choices = [["yes", "no"], ["é", "no"]]
    nats = [[-3 * math.log(2), -1.0], [-8 * math.log(2), -1.0]]
    found = normalised.add(LM, task(choices, [0, 0]), {}, samples(choices, nats))
    assert found["bits_per_byte,none"] == pytest.approx((1.0 + 4.0) / 2)
    assert found["bits_per_byte_stderr,none"] == pytest.approx(3.0 / 2**0.5 / 2**0.5)


def test_the_most_likely_of_several_right_answers_counts() -> None:
    answers = Answers(texts=["ab", "c", ""], requests=[], nats=[-2.0, -0.5, 0.0], right=[0, 1, 2])
    assert normalised.bits_per_byte(answers) == pytest.approx(0.5 / math.log(2)), "an empty answer has no bytes"
    empty = Answers(texts=[""], requests=[""], nats=[0.0], right=[0])
    assert normalised.bits_per_byte(empty) is None


def test_guessing_depends_on_the_choices_and_the_right_ones_of_each_item() -> None:
    choices = [["a", "b", "c", "d"], ["a", "b"]]
    given = samples(choices, [[-1.0] * 4, [-1.0] * 2])
    found = normalised.add(LM, task(choices, [[0, 1], 0]), {"acc,none": 1.0, "f1,none": 0.3}, given)
    assert found["acc_chance,none"] == pytest.approx((2 / 4 + 1 / 2) / 2)
    assert "f1_chance,none" not in found
    unknown = normalised.add(LM, task(choices, [0, 9]), {"acc,none": 1.0}, samples(choices, [[-1.0] * 4, [-1.0] * 2]))
    assert "acc_chance,none" not in unknown, "the second item has no right choice"


def _right(*texts: str) -> dict[Any, Answers]:
    return {at: Answers(texts=[text], requests=[text], nats=[-1.0], right=[0]) for at, text in enumerate(texts)}


def test_guessing_is_half_for_pairs_and_nothing_for_written_answers() -> None:
    pairs = samples([["a", "b"]], [[-1.0, -2.0]])
    assert normalised.chance("pct_stereotype", task([["a", "b"]], [0], own=True), {}, pairs) == 0.5
    assert normalised.chance("acc", task([["a", "b"]], [0], own=True), {}, pairs) is None
    writes = SimpleNamespace(config=SimpleNamespace(output_type="generate_until"))
    assert normalised.chance("exact_match", writes, _right("one", "two"), []) == 0.0
    assert normalised.chance("exact_match", writes, {}, []) is None, "no right answer is known"
    assert normalised.chance("exact_match", writes, _right("Yes", "No", "Yes"), []) is None
    numbers = map(str, range(100))
    assert normalised.chance("exact_match", writes, _right(*numbers, "7", "7", "8"), []) == 0.0
    assert normalised.chance("f1", writes, _right("one", "two"), []) is None
    assert normalised.chance("acc", writes, {}, []) is None, "a function of the definition may read a letter"


@dataclass
class Model:
    """Gives a text one token per character, and each token the same log-likelihood."""

    max_length: int = 12
    asked: list[tuple[str, str]] = field(default_factory=list)

    def tok_encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return list(text.encode())

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return [(-0.5 * len(request.args[1]), False) for request in requests]


def defined(kind: str, *, target: Any = "", choices: Any = None, multiple_input: int = 0, **config: Any) -> Any:
    settings = {"output_type": kind, "process_results": None, "target_delimiter": " ", "doc_to_choice": choices}
    return SimpleNamespace(
        config=SimpleNamespace(**{**settings, "doc_to_target": "{{target}}", **config}),
        doc_to_target=lambda doc: doc.get("target", target),
        doc_to_choice=lambda doc: choices,
        doc_to_text=lambda doc: doc["text"],
        multiple_input=multiple_input,
    )


def ranked(doc: dict[str, Any], *nats: float, target: Any = 0, texts: tuple[str, ...] = ()) -> dict[str, Any]:
    requests = [("Q:", f" {text}") for text in texts or ["x"] * len(nats)]
    given = [(each, False) for each in nats]
    return {"doc_id": 0, "filter": "none", "doc": doc, "target": target, "arguments": requests, "filtered_resps": given}


def written(prompt: str, doc: dict[str, Any], number: int = 0, filter_name: str = "none") -> dict[str, Any]:
    request: tuple[str, Any] = (prompt, {"until": []})
    return {"doc_id": number, "filter": filter_name, "doc": doc, "arguments": [request], "filtered_resps": ["?"]}


@pytest.mark.parametrize(
    ("target", "right"), [(1, [1]), ("b", [1]), ([0, 2], [0, 2]), (["c", "no choice"], [2]), (7, None), ("z", None)]
)
def test_the_right_choices_are_named_by_their_place_or_their_text(target: Any, right: list[int] | None) -> None:
    loaded = defined("multiple_choice", choices=["a", "b", "c"])
    found = normalised.right_answers_of(Model(), loaded, [ranked({"target": target}, -1.0, -2.0, -3.0)])
    assert [each.right for each in found.values()] == ([right] if right else [])


def test_prompts_of_one_answer_are_ranked_by_the_right_prompt() -> None:
    loaded = defined("multiple_choice", choices=["he", "she"], multiple_input=2)
    item = ranked({"text": 1}, -1.0, -2.0, target="was late.", texts=("was late.", "was late."))
    (found,) = normalised.right_answers_of(Model(), loaded, [item]).values()
    assert (found.texts, found.right) == (["was late."] * 2, [1])


def test_unconditional_requests_are_no_choices() -> None:
    loaded = defined("multiple_choice", choices=["a", "b"])
    (found,) = normalised.right_answers_of(Model(), loaded, [ranked({"target": 0}, -1.0, -2.0, -3.0, -4.0)]).values()
    assert found.nats == [-1.0, -2.0]


def test_a_written_answer_is_asked_for_once_an_item_as_in_a_solved_example() -> None:
    lm, doc = Model(), {"target": "42"}
    samples = [written("A:", doc, filter_name=name) for name in ("strict", "loose")]
    (found,) = normalised.right_answers_of(lm, defined("generate_until"), samples).values()
    assert lm.asked == [("A:", " 42")]
    assert (found.texts, found.nats, found.right) == (["42"], [-1.5], [0])
    places = defined("generate_until", choices=["no", "yes"])
    chosen = normalised.right_answers_of(Model(), places, [written("A:", {"target": n}, n) for n in (0, 1, 2, -1)])
    assert {number: each.texts for number, each in chosen.items()} == {0: ["no"], 1: ["yes"]}
    normalised.right_answers_of(lm, defined("generate_until"), [written("def f():\n", doc)])
    assert lm.asked[1:] == [("def f():\n", "42")], "white space is there already"
    normalised.right_answers_of(lm, defined("generate_until"), [written("[/INST]", doc)], has_chat=True)
    assert lm.asked[2:] == [("[/INST]", "42")]


def test_the_first_of_several_right_texts_counts_and_too_long_or_missing_ones_do_not() -> None:
    targets: list[Any] = [["first", "second"], [], "", "longer than the context", 12]
    samples = [written("A:", {"target": target}, number) for number, target in enumerate(targets)]
    found = normalised.right_answers_of(Model(), defined("generate_until"), samples)
    assert {number: each.texts for number, each in found.items()} == {0: ["first"], 4: ["12"]}


def test_a_definition_that_checks_answers_with_functions_has_no_right_answer() -> None:
    lm = Model()
    own = defined("multiple_choice", choices=["a", "b"], process_results=lambda doc, results: {})
    assert normalised.right_answers_of(lm, own, [ranked({"target": 0}, -1.0, -2.0)]) == {}
    assert (
        normalised.right_answers_of(lm, defined("generate_until", doc_to_target=0), [written("A:", {"target": 0})])
        == {}
    )
    assert normalised.right_answers_of(lm, defined("loglikelihood_rolling"), [written("A:", {"target": "b"})]) == {}
    assert lm.asked == []


def test_the_request_for_a_written_answer_changes_no_other_score(lm: Any, tmp_path: Path) -> None:
    """The answer's log-likelihood is that of the same text as the only choice."""
    definition = suites.task("smoke", "smoke_gsm8k")
    result = harness.run(lm, definition, tmp_path, limit=2, seed=1)
    first = result.samples[0]
    (given,) = lm.loglikelihood([SimpleNamespace(args=(first["arguments"][0][0], f" {first['target']}"))])
    bits = -given[0] / len(first["target"].encode()) / 0.6931471805599453
    assert first["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert {sample["metrics"][0] for sample in result.samples} == {"exact_match"}
    document = json.loads(definition.items.read_text(encoding="utf-8").splitlines()[0])
    assert first["target"] == document["answer"]
