"""The page's arithmetic, run where it runs: in the browser."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

pytestmark = pytest.mark.processes


def call(page: Page, module: str, expression: str) -> Any:
    """Return the value of an expression; ``m`` is a module of the page."""
    return page.evaluate(f"import('/static/{module}.js').then((m) => {expression})")


def test_smoothing_keeps_a_constant_and_gaps(page: Page) -> None:
    xs = list(range(100))
    assert call(page, "curves", f"m.smooth({xs}, Array(100).fill(3), 0.9)") == pytest.approx([3.0] * 100)
    smoothed = call(page, "curves", "m.smooth([0, 1, 2, 3], [1, null, 1, 5], 0.99)")
    assert smoothed[1] is None
    assert smoothed[0] == pytest.approx(1)
    assert 1 < smoothed[3] < 5


def test_smoothing_is_alike_for_runs_of_different_lengths(page: Page) -> None:
    short = call(page, "curves", "m.smooth([...Array(101).keys()], [...Array(101).keys()], 0.95)")
    long = call(page, "curves", "m.smooth([...Array(101).keys()].map((x) => 1e9 * x), [...Array(101).keys()], 0.95)")
    assert short == pytest.approx(long)


def test_a_difference_interpolates_the_other_curve_and_ends_with_it(page: Page) -> None:
    other = "{xs: [0, 10, 20], ys: [4, null, 2]}"
    assert call(page, "curves", f"m.minus([0, 5, 20, 30], [5, 4, null, 1], {other})") == [1, 0.5, None, None]


def test_the_range_without_the_start_keeps_late_spikes(page: Page) -> None:
    fall = "[...Array(200).keys()].map((step) => (step < 5 ? 10 : step === 150 ? 4 : 2))"
    low, high = call(page, "curves", f"m.withoutStart([{fall}])")
    assert low < 2
    assert 4 < high < 5
    assert call(page, "curves", "m.withoutStart([[1, 2, 3]])") is None


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.count(1.8e12)", "1.8T"),
        ("m.count(833000)", "833K"),
        ("m.count(null)", "–"),
        ("m.duration(3.21)", "3.2 s"),
        ("m.duration(200)", "3 min 20 s"),
        ("m.duration(183600)", "2 d 3 h"),
        ("m.number(0.00001234)", "1.23e-5"),
        ("m.number(2.4906912)", "2.491"),
        ("m.percent(0.5)", "50 %"),
        ("m.number(28538)", "28.5K"),
        ("m.score({value: 0.512, stderr: 0.0112})", "0.512 ± 0.011"),
        ("m.score({value: 0.427777, stderr: 0.07})", "0.428 ± 0.07"),
        ("m.tick(491520, 1000)", "492K"),
        ("m.tick(491520.5, 0.5)", "491,520.5"),
        ("m.tick(2.44, 0.02)", "2.44"),
        ("m.tick(0.0005, 0.0005)", "5e-4"),
        ("m.bytes(33123456)", "31.6 MiB"),
    ],
)
def test_quantities_have_few_digits_and_units(page: Page, expression: str, text: str) -> None:
    assert call(page, "format", expression) == text


def test_an_address_survives_being_read_and_written(page: Page) -> None:
    address = "#/compare?runs=a,b&zoom=1:2&y.loss=0.5:3"
    assert call(page, "state", f"m.format(m.parse({address!r}))") == address
    assert call(page, "state", "[m.parse('#/nowhere/x').view, m.parse('').view]") == ["unknown", "runs"]
    assert call(page, "state", "m.parse('#/run/%E0%A4%A').id") == "%E0%A4%A"
    assert call(page, "state", "[m.range('1:2'), m.range('1:x'), m.range('2:2'), m.range('')]") == [
        [1, 2],
        None,
        None,
        None,
    ]


def test_equal_values_are_in_the_middle_of_their_axis(page: Page) -> None:
    single = "[{x: [491520], y: [0.001], mode: 'markers'}]"
    assert call(page, "charts", f"[m.extent({single}, 'x'), m.extent({single}, 'y')]") == [[0, 983040], [0, 0.002]]
    assert call(page, "charts", "m.ticks([0, 983040], false, 5).ticktext") == ["0", "200K", "400K", "600K", "800K"]
    assert call(page, "charts", "m.ticks([1, 2000], true, 5).ticktext") == ["1", "10", "100", "1000"]
    assert call(page, "curves", "m.withoutStart([Array(200).fill(3)])") is None
