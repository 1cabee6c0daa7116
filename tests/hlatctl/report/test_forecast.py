"""The summary of many simulations."""

from __future__ import annotations

import pytest

from hlatctl.report import forecast
from hlatctl.report.forecast import Simulation, Spread


def simulation(seed: int, days: float, message: str = "") -> Simulation:
    return Simulation(
        seed=seed,
        message=message,
        wall_s=days * 86400,
        uptime_fraction=0.98,
        goodput_fraction=0.95,
        lost_s=3600.0 * seed,
        failures=seed,
        cost_usd=1000.0 * days,
    )


def test_a_spread_is_interpolated_linearly() -> None:
    assert Spread.of([4.0]) == Spread(low=4.0, median=4.0, high=4.0)
    spread = Spread.of([float(value) for value in range(101)])
    assert (spread.low, spread.median, spread.high) == pytest.approx((5.0, 50.0, 95.0))


def test_unfinished_simulations_are_named_and_not_counted() -> None:
    outlook = forecast.outlook([simulation(1, 10), simulation(2, 20), simulation(3, 99, "gave up")])
    assert outlook is not None
    assert (outlook.courses, outlook.unfinished) == (3, {3: "gave up"})
    assert outlook.wall_s.median == 15 * 86400
    assert ("not finished", "seed 3: gave up") in forecast.facts(outlook, 0.0)
    assert forecast.facts(outlook, 0.0)[0][1].startswith("1970-01-16")
    assert forecast.outlook([simulation(3, 99, "gave up")]) is None


def test_the_forecast_end_names_the_number_of_simulations() -> None:
    for finished, said in ((1, "of 1 finished simulation"), (2, "of 2 finished simulations")):
        outlook = forecast.outlook([*(simulation(seed, 10) for seed in range(finished)), simulation(9, 99, "gave up")])
        assert outlook is not None
        assert forecast.facts(outlook, 0.0)[0][1] == (
            f"1970-01-11 00:00:00 UTC (median {said}); 1970-01-11 00:00:00 UTC (95th percentile)"
        )


def test_the_table_has_a_row_for_each_variant() -> None:
    rows = forecast.rows({"as configured": forecast.outlook([simulation(1, 10)]), "worse": None})
    assert rows[0] == [
        "as configured",
        "10 d 0 h (10 d 0 h to 10 d 0 h)",
        "98.00 % (98.00 to 98.00)",
        "95.00 % (95.00 to 95.00)",
        "1 h 0 min (1 h 0 min to 1 h 0 min)",
        "1",
        "10,000",
    ]
    assert rows[1][:2] == ["worse", "never finished"]
    assert all(len(row) == len(forecast.HEADER) for row in rows)
