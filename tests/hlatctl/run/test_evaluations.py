"""Milestones are found by their tokens, exact or as printed; scores as a line of text."""

from __future__ import annotations

from typing import Any

import pytest

from hlatctl.run.errors import ConfigError
from hlatctl.run.evaluations import find_milestone, headlines, in_words


@pytest.mark.parametrize("tokens", [2_506_752, 2_510_000])
def test_a_milestone_is_found_by_its_tokens_or_by_what_is_printed_for_them(tokens: int) -> None:
    assert find_milestone(tokens, {833_333, 1_666_666, 2_506_752}, "none") == 2_506_752


def test_exact_tokens_decide_between_milestones_that_are_printed_alike() -> None:
    alike = [2_506_752, 2_508_800]
    assert find_milestone(2_508_800, alike, "none") == 2_508_800
    with pytest.raises(ConfigError, match=r"none\nhint: nearest: 2\.51M \(2506752\), 2\.51M \(2508800\)"):
        find_milestone(2_510_000, alike, "none")


def test_a_missing_milestone_is_answered_with_the_three_nearest() -> None:
    with pytest.raises(ConfigError, match=r"run has none\nhint: nearest: 100 \(100\), 200 \(200\), 300 \(300\)$"):
        find_milestone(150, [400, 300, 200, 100], "run has none")


def scores(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"metric": "acc", "value": 0.25, "stderr": None, "n": 4} for name in names}


def test_a_group_summarizes_its_tasks_and_a_first_metric_the_others() -> None:
    names = [
        "validation_bits_per_byte",
        "validation_loss",
        "mmlu_anatomy",
        "mmlu_stem",
        "mmlu",
        "gsm8k",
        "piqa",
        "gsm8k_flexible_extract",
        "truthfulqa_mc1",
        "truthfulqa_mc2",
    ]
    assert headlines(names) == ["validation_loss", "mmlu", "gsm8k", "piqa", "truthfulqa_mc1", "truthfulqa_mc2"]


def test_a_line_has_the_number_of_scores_it_omits() -> None:
    assert in_words(scores("mmlu", "mmlu_anatomy", "mmlu_stem")) == "mmlu 0.250 (and 2 more)"
    assert in_words(scores("smoke_mmlu", "smoke_bbh")) == "smoke_mmlu 0.250, smoke_bbh 0.250"
    assert in_words({}) == ""


def test_a_line_can_have_the_noise_and_the_score_of_guessing() -> None:
    known = {**scores("a"), "b": {"metric": "acc", "value": 0.31, "stderr": 0.0146, "chance": 0.25, "n": 4}}
    assert in_words(known, with_noise=True) == "a 0.250, b 0.310 ± 0.015 (guessing 0.250)"
    assert in_words(known) == "a 0.250, b 0.310"
