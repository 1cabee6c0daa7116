"""The steps of a run as columns."""

from __future__ import annotations

import pytest

from hlatctl.run.steps import StepSeries


@pytest.fixture
def restarted() -> StepSeries:
    """Return steps 1 to 9 of ten tokens each: 1 to 5, then 4 to 6 and 6 to 9 after restarts."""
    series = StepSeries()
    for first, last in ((1, 5), (4, 6), (6, 9)):
        series.supersede(first - 1)
        for step in range(first, last + 1):
            series.add({"kind": "step", "step": step, "tokens": 10 * step, "loss": 100.0 * first + step})
    return series


def test_the_steps_until_some_tokens_cross_restarts(restarted: StepSeries) -> None:
    for tokens in range(-5, 120):
        reached = next((step for step in range(1, 10) if 10 * step >= tokens), None)
        expected = [] if reached is None else list(range(reached, max(0, reached - 4), -1))
        assert [event["step"] for event in restarted.until(tokens, 4)] == expected


def test_the_newest_steps_cross_restarts(restarted: StepSeries) -> None:
    assert [event["step"] for event in restarted.last(5)] == [9, 8, 7, 6, 5]
    assert [event["loss"] for event in restarted.last(5)] == [609.0, 608.0, 607.0, 606.0, 405.0]
    assert len(list(restarted.last(100))) == 9
    assert list(StepSeries().until(0, 5)) == []
