"""The steps of a run as columns."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from hlatctl.run import steps
from hlatctl.run.steps import Home, Rows, StepSeries


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


def test_a_few_evenly_spaced_losses_cross_restarts() -> None:
    series = StepSeries()
    for first, last in ((1, 1000), (501, 3000)):
        series.supersede(first - 1)
        for step in range(first, last + 1):
            series.add({"kind": "step", "step": step, "tokens": step, "loss": float(step)})
    losses = series.losses()
    assert 64 <= len(losses) < 128
    assert {after - before for before, after in pairwise(losses)} <= {32.0, 44.0}, "44 is where rows were dropped"
    assert StepSeries().losses() == []


def test_numbers_without_a_row_of_the_table_are_columns_from_where_they_came(restarted: StepSeries) -> None:
    restarted.add({"kind": "step", "step": 10, "tokens": 100, "router_entropy": 1.5, "note": "text", "Bad-Name": 1})
    restarted.add({"kind": "step", "step": 11, "tokens": 110, "router_entropy": "nan"})
    assert restarted[10] == {"kind": "step", "step": 10, "tokens": 100, "router_entropy": 1.5}
    assert "router_entropy" not in restarted[9]
    values = restarted.columns("router_entropy")[0]
    assert [value for value in values if not math.isnan(value)] == [1.5]
    assert len(values) == 11


def test_a_run_keeps_a_limited_number_of_them() -> None:
    series = StepSeries()
    series.add({"kind": "step", "step": 1, "tokens": 1, **{f"expert_{n}": n for n in range(100)}})
    assert len(series.rows.others) == 32


def test_files_of_rows_have_the_columns_of_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SEGMENT_ROWS", 4)
    monkeypatch.setattr(steps, "_COLUMN_BYTES", 32)
    events = [
        {"kind": "step", "step": n, "tokens": n, "loss": 1.0 / n, **({"router_entropy": n} if n > 6 else {})}
        for n in range(1, 15)
    ]

    def rebuild() -> Rows:
        rows = Rows()
        for event in events:
            rows.append(event)
        return rows

    kept = Rows(Home(tmp_path / "fold", rebuild))
    for event in events:
        kept.append(event)
    assert [segment.columns for segment in kept.segments] == [len(steps.FIELDS) + 1] + [len(steps.FIELDS) + 2] * 2
    in_memory = rebuild()
    for name in ("loss", "router_entropy"):
        assert kept.columns(name)[0].tobytes() == in_memory.columns(name)[0].tobytes()
    assert [kept.event(row) for row in range(14)] == events
    kept.segments[1].path.unlink()
    assert [kept.event(row) for row in range(14)] == events
