"""Metrics from log-likelihoods: bits per byte, accuracy by length, guessing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from eval import normalised
from eval.normalised import Answers

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
