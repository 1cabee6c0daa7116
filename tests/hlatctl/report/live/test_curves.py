"""Curves are those of the steps that count, however they were read, and reduced without losing extremes."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import numpy as np
import pytest

from conf.of_run import of_run
from hlatctl.report.live.curves import CurvesRequest, StepColumns, curves, preview
from hlatctl.report.live.index import OpenRun
from hlatctl.run.errors import ConfigError
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from hlatctl.run.steps import StepSeries
from tests.hlatctl.conftest import MakeRun


def _curves(run: RunPaths, **wanted: Any) -> dict[str, Any]:
    opened = OpenRun(run)
    state, columns = opened.refresh().state, StepColumns()
    columns.update(state.steps)
    return curves(columns, state, opened.config, CurvesRequest(**wanted))


def test_superseded_steps_are_drawn_once(make_run: MakeRun) -> None:
    found = _curves(make_run(), points=1000)
    assert found["xs"].tolist() == list(range(1, 307))
    assert len(found["series"]["loss"]["y"]) == 306
    assert found["newest_step"] == 306


def test_groups_keep_the_extremes(make_run: MakeRun) -> None:
    run = make_run()
    every, few = _curves(run, points=306), _curves(run, points=7)
    loss, reduced = every["series"]["loss"]["y"], few["series"]["loss"]
    assert len(few["xs"]) == len(reduced["y"]) == 7
    assert few["steps"][-1] == 306
    assert min(reduced["low"]) == pytest.approx(min(loss))
    assert max(reduced["high"]) == pytest.approx(max(loss))
    counts = np.diff([0, *few["steps"]])
    assert np.average(reduced["y"], weights=counts) == pytest.approx(np.mean(loss))


def test_points_of_a_width_are_at_the_same_steps_in_runs_of_any_length(make_run: MakeRun) -> None:
    whole, part = (_curves(make_run(name), every=50, last_step=last) for name, last in (("a", None), ("b", 130)))
    assert list(whole["steps"]) == [50, 100, 150, 200, 250, 300, 306]
    assert list(part["steps"]) == [50, 100, 130]
    np.testing.assert_array_equal(whole["series"]["loss"]["y"][:2], part["series"]["loss"]["y"][:2])
    assert list(_curves(make_run("c"), every=50, first_step=101)["steps"]) == [150, 200, 250, 300, 306]


def test_a_part_has_both_ends(make_run: MakeRun) -> None:
    found = _curves(make_run(), first_step=100, last_step=110)
    assert found["steps"].tolist() == list(range(100, 111))
    assert _curves(make_run("b"), first_step=1000)["xs"].tolist() == []


def test_axes(make_run: MakeRun) -> None:
    run = make_run()
    config = of_run(run)
    steps = _curves(run)["xs"]
    assert _curves(run, x="tokens")["xs"].tolist() == [step * config.tokens_per_step for step in steps]
    assert _curves(run, x="time")["xs"][0] > 1_600_000_000
    flops = _curves(run, x="flops")["xs"]
    assert flops[1] / flops[0] == pytest.approx(2)
    few = _curves(run, x="flops", points=7)
    assert few["tokens"].tolist() == [step * config.tokens_per_step for step in few["steps"]]
    assert few["began_unix_s"] < few["times"][0] < few["times"][-1]


def test_validation_has_its_own_points_at_the_milestones(make_run: MakeRun) -> None:
    found = _curves(make_run(), keys=("validation_loss",))
    validation = found["series"]["validation_loss"]
    assert validation["steps"] == [102, 204, 306]
    assert validation["y"] == [4.31, 3.72, 3.51]
    assert [milestone["step"] for milestone in found["milestones"]] == [102, 204, 306]
    assert "validation_loss" in found["available"]


def test_values_that_are_not_finite_are_skipped_and_named(make_run: MakeRun) -> None:
    run = make_run(until="killed")
    with JournalWriter(run, train_writer(0), 1) as train:
        for step, loss in ((131, math.nan), (132, math.inf), (133, 2.0)):
            train.append("step", step=step, tokens=step * 8192, loss=loss)
    found = _curves(run, points=1, first_step=131)
    assert found["skipped"].tolist() == [131, 132]
    series = found["series"]["loss"]
    assert (series["y"].tolist(), series["low"].tolist(), series["high"].tolist()) == ([2.0], [2.0], [2.0])
    alone = _curves(run, points=1, first_step=131, last_step=132)["series"]["loss"]
    assert all(math.isnan(alone[part][0]) for part in ("y", "low", "high"))


def test_spikes_are_named_where_the_run_has_their_steps(make_run: MakeRun) -> None:
    run = make_run(until="killed")
    with JournalWriter(run, train_writer(0), 1) as train:
        for step in (131, 132):
            train.append("step", step=step, tokens=step * 8192, loss=1.0, grad_norm=9.0)
        for step in (131, 200):
            train.append("gradient_spike", step=step, grad_norm=9.0, mean=1.0)
    assert _curves(run)["spikes"] == [{"x": 131.0, "y": 9.0}]


def test_memory_is_a_curve_where_the_trainer_knows_it(make_run: MakeRun) -> None:
    run = make_run(until="killed")
    assert "memory_bytes" not in _curves(run)["available"]
    with JournalWriter(run, train_writer(0), 1) as train:
        for step, used in ((131, 1 << 30), (132, None), (133, 3 << 30)):
            train.append("step", step=step, tokens=step * 8192, loss=1.0, memory_bytes=used)
    found = _curves(run, keys=("memory_bytes",), points=1, first_step=131)
    series = found["series"]["memory_bytes"]
    assert (series["y"].tolist(), series["low"].tolist(), series["high"].tolist()) == ([2.0], [1.0], [3.0])
    assert found["metrics"]["memory_bytes"] == {"title": "Memory", "unit": "GiB", "steep": False}


def test_a_number_without_a_row_of_the_table_is_a_curve_too(make_run: MakeRun) -> None:
    run = make_run(until="killed")
    with JournalWriter(run, train_writer(0), 1) as train:
        for step, entropy in ((131, None), (132, 2.5), (133, 3.5)):
            train.append("step", step=step, tokens=step * 8192, loss=1.0, router_entropy=entropy)
    found = _curves(run, keys=("router_entropy",), points=3, first_step=131)
    assert found["available"][-1] == "router_entropy"
    assert found["metrics"]["router_entropy"]["title"] == "Router entropy"
    np.testing.assert_array_equal(found["series"]["router_entropy"]["y"], [math.nan, 2.5, 3.5])


def test_a_run_without_steps_has_no_curve(make_run: MakeRun) -> None:
    found = _curves(make_run(until="created"), keys=("loss", "mfu", "validation_loss"))
    assert len(found["xs"]) == 0
    assert found["available"] == []


def test_a_curve_that_the_run_does_not_have_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="keys=los: no such curve"):
        _curves(make_run(), keys=("los",))


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"x": "days"}, "x=days: no such axis"),
        ({"points": 0}, "points=0: must be 1 to"),
        ({"points": 10**9}, "points=1000000000: must be 1 to"),
    ],
)
def test_an_impossible_request_is_refused(wanted: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CurvesRequest(**wanted)


def test_columns_that_grow_equal_those_read_at_once() -> None:
    """Restarts, late steps and repetitions, at random."""
    chance = random.Random(1)
    steps, grown, at = StepSeries(), StepColumns(), 0
    for _ in range(300):
        if chance.random() < 0.1:
            at = chance.randint(0, at)
            steps.supersede(after=at)
        for _ in range(chance.randint(0, 4)):
            at += chance.randint(1, 2)
            steps.add({"step": at, "tokens": at * 10, "loss": chance.random()})
        if at and chance.random() < 0.1:
            steps.add({"step": chance.randint(1, at), "tokens": 1, "loss": chance.random()})
        if chance.random() < 0.5:
            grown.update(steps)
    grown.update(steps)
    for name in ("step", "tokens", "loss"):
        (expected,) = steps.columns(name)
        np.testing.assert_array_equal(grown[name], np.asarray(expected, grown[name].dtype))
    assert len(curves(grown, RunState(steps=steps), None, CurvesRequest(points=20))["xs"]) == 20


def test_a_run_that_is_still_being_read_has_a_preview_without_superseded_steps(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[preview.__module__], "_LEAST_BYTES", 0)
    opened = OpenRun(make_run())
    with opened.lock:  # as if another thread read it
        assert not opened.read_within(0.0)
        found = preview(opened, CurvesRequest(keys=("loss",)))
        assert not opened.read_within(0.0)
    assert found is not None
    steps = found["steps"].tolist()
    assert found["preview"] == len(steps) > 100
    assert steps == sorted(set(steps))
    whole = _curves(opened.run, points=1000)
    at = dict(zip(whole["steps"].tolist(), whole["series"]["loss"]["y"].tolist(), strict=True))
    assert found["series"]["loss"]["y"].tolist() == [at[step] for step in steps]
    assert opened.read_within(60.0)
    assert opened.state.step == 306


def test_a_short_run_has_no_preview(make_run: MakeRun) -> None:
    assert preview(OpenRun(make_run()), CurvesRequest()) is None


def test_of_too_many_spikes_the_tallest_are_marked(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, tall = make_run(), 400
    with JournalWriter(run, train_writer(0), 2) as train:
        for step, norm in ((tall, 9.0), (401, 0.4), (402, 5.0)):
            train.append("step", step=step, tokens=step * 8192, loss=2.0, grad_norm=norm)
            train.append("gradient_spike", step=step, grad_norm=norm, mean=0.4)
        train.append("gradient_spike", step=900, grad_norm=99.0, mean=0.4)  # its step doesn't count
    monkeypatch.setattr(sys.modules[preview.__module__], "_MOST_SPIKES", 1)
    assert [(spike["x"], float(spike["y"])) for spike in _curves(run)["spikes"]] == [(tall, 9.0)]
