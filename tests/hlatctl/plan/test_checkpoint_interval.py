"""Optimal intervals against published ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.plan.checkpoint_interval import daly_s, least_time_between_failures_s, young_s

SECONDS = st.floats(1e-3, 1e8)


@pytest.mark.parametrize(("between_min", "optimum_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_interval_is_that_of_his_figures(between_min: float, optimum_min: float) -> None:
    # Daly 2006, figures 3 to 5: a save of 5 min.
    optimal_min = daly_s(5 * 60, between_min * 60) / 60
    assert round(optimal_min, 1 if optimum_min < 10 else 0) == optimum_min


def test_youngs_interval_is_the_root_of_twice_cost_and_time_between_failures() -> None:
    assert young_s(2.0, 3600.0) == 120.0


def test_if_saves_are_as_long_as_the_time_between_failures_so_is_the_interval() -> None:
    assert daly_s(20.0, 10.0) == daly_s(500.0, 10.0) == 10.0


@given(save_s=SECONDS, between_s=SECONDS)
def test_the_two_agree_if_saves_are_short(save_s: float, between_s: float) -> None:
    daly = daly_s(save_s, between_s)
    assert daly > 0
    if save_s < 1e-4 * between_s:
        assert daly == pytest.approx(young_s(save_s, between_s), rel=0.01)


def test_no_failure_bounds_the_time_between_failures() -> None:
    # The chance of none in 3 h is 5 % if they come 3 / ln 20 h apart.
    bound_s = least_time_between_failures_s(3 * 3600)
    assert math.exp(-3 * 3600 / bound_s) == pytest.approx(0.05)
