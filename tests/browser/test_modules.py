"""The page's arithmetic, run where it runs: in the browser."""

from __future__ import annotations

import json
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
        ("m.bytes(33123456)", "31.6 MiB"),
    ],
)
def test_quantities_have_few_digits_and_units(page: Page, expression: str, text: str) -> None:
    assert call(page, "format", expression) == text


def test_the_ticks_of_an_axis_are_in_one_unit(page: Page) -> None:
    cases: list[tuple[list[float], float, list[str]]] = [
        ([0, 0.0005, 0.001, 0.0015], 0.0005, ["0", "0.0005", "0.001", "0.0015"]),
        ([0, 0.00005, 0.0001], 0.00005, ["0", "0.5e-4", "1e-4"]),
        ([-0.5, 0, 0.5], 0.5, ["-0.5", "0", "0.5"]),
        ([5000, 10_000], 5000, ["5K", "10K"]),
        ([0, 5e8, 1e9], 5e8, ["0", "0.5B", "1B"]),
        ([491_520.5, 491_521], 0.5, ["491,520.5", "491,521"]),
        ([2.42, 2.44], 0.02, ["2.42", "2.44"]),
        ([1e-4, 1e-3, 1e-2, 1], 0, ["1e-4", "1e-3", "1e-2", "1e0"]),
        ([100, 1000, 10_000], 0, ["100", "1K", "10K"]),
        ([0.02, 0.05, 1], 0, ["0.02", "0.05", "1"]),
        ([0], 1, ["0"]),
    ]
    given = json.dumps([[values, step] for values, step, _ in cases])
    assert call(page, "format", f"{given}.map(([values, step]) => m.ticks(values, step))") == [
        texts for *_, texts in cases
    ]


def items(page: Page, rows: list[dict[str, Any]], **options: Any) -> list[tuple[Any, ...]]:
    given = {"sort": "created", "group": "sweep", **options}
    found = call(page, "rows", f"m.items({json.dumps(rows)}, {{...{json.dumps(given)}, open: () => true}})")
    return [(item.get("group"), len(item["rows"])) if "group" in item else (item["row"]["run_id"],) for item in found]


def test_runs_are_grouped_by_tag_and_fork_and_others_follow(page: Page) -> None:
    rows: list[dict[str, Any]] = [
        {"run_id": "a", "status": "finished", "loss": 2, "tags": {"team": "x"}, "cost_usd": 1},
        {"run_id": "b", "status": "failed", "loss": 4, "parent": "a", "cost_usd": 2},
        {"run_id": "c", "status": "finished", "loss": None, "tags": {"team": "x"}},
    ]
    assert items(page, rows, group="tag:team") == [("x", 2), ("a",), ("c",), ("b",)]
    assert items(page, rows, group="fork") == [("a", 2), ("a",), ("b",), ("c",)]
    assert items(page, rows, group="none", sort="-loss") == [("b",), ("a",), ("c",)]
    group = call(
        page, "rows", f"m.items({json.dumps(rows)}, {{sort: 'loss', group: 'fork', open: () => false}})[0].row"
    )
    assert [group[key] for key in ("loss", "low", "high", "cost_usd", "status")] == [3, 2, 4, 3, "failed"]


def test_settings_that_vary_are_known_and_sort_as_numbers(page: Page) -> None:
    given = (["lr=1e-2", "a=1"], ["lr=0.004", "a=1"], ["a=1"], ["lr=none", "a=1"])
    rows = [{"run_id": str(n), "overrides": each} for n, each in enumerate(given)]
    assert call(page, "rows", f"m.varying({json.dumps(rows)})") == [{"key": "lr", "amount": 3}]
    assert items(page, rows, sort="set:lr") == [("1",), ("0",), ("3",), ("2",)]
    assert items(page, rows, sort="-set:lr") == [("3",), ("0",), ("1",), ("2",)]


def test_archived_runs_are_hidden_until_they_are_asked_for(page: Page) -> None:
    rows = json.dumps([{"run_id": "a", "status": "finished"}, {"run_id": "b", "status": "archived", "parent": "a"}])
    cases: list[tuple[dict[str, str], list[str]]] = [
        ({}, ["a"]),
        ({"q": "archived:yes"}, ["b"]),
        ({"q": "archived:no"}, ["a"]),
        ({"q": "status:archived"}, ["b"]),
        ({"status": "archived"}, ["b"]),
        ({"arch": "1"}, ["a", "b"]),
        ({"q": "group:none a"}, ["a"]),
        ({"q": "fork:a", "arch": "1"}, ["b"]),
    ]
    given = json.dumps([params for params, _ in cases])
    found = call(page, "rows", f"{given}.map((params) => m.filtered({rows}, params).kept.map((row) => row.run_id))")
    assert found == [kept for _, kept in cases]


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
    assert call(page, "charts", "m.ticks([17, 20], false, 9, true).ticktext") == ["17", "18", "19", "20"]
    assert call(page, "charts", "m.ticks([1, 2000], true, 5).ticktext") == ["1", "10", "100", "1000"]
    assert call(page, "curves", "m.withoutStart([Array(200).fill(3)])") is None
