"""Milestones are found by their tokens, exact or as they are printed."""

from __future__ import annotations

import pytest

from hlatctl.run.errors import ConfigError
from hlatctl.run.milestones import find_milestone


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
