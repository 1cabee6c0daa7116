"""The figures of a run: which there are, what their captions say, and what their data are."""

from __future__ import annotations

import csv
import math
import sys
from dataclasses import replace
from typing import Any

import pytest

import conf.load
from conf.compose import compose
from hlatctl.report.baselines import load
from hlatctl.report.figures import evaluation, figures, training
from hlatctl.report.figures.figure import Figure, Marks, is_wide, robust_limits
from hlatctl.report.numbers import Scaling, Spikes
from hlatctl.report.record import read_record
from hlatctl.report.scores import courses_of
from hlatctl.run.errors import DependencyError
from tests.hlatctl.conftest import MakeRun
from tests.hlatctl.report.test_scores import scored


def test_the_caption_of_the_loss_says_what_its_axis_omits(make_run: MakeRun) -> None:
    run = make_run()
    found = {figure.name: figure for figure in figures(read_record(run, conf.load.load(run.config)))}
    loss = found["loss"]
    rows = list(csv.DictReader(loss.csv().splitlines()))
    highest = max(float(row["loss_nats_per_token"]) for row in rows if row["loss_nats_per_token"])
    assert f"The axis omits the highest 5 of 306 points, up to {highest:.2f}." in loss.caption
    held_out = [row["validation_loss_nats_per_token"] for row in rows if row["validation_loss_nats_per_token"]]
    assert held_out == ["4.31", "3.72", "3.51"]
    assert "grey ticks at the bottom are restarts" in loss.caption
    assert ">spike<" in found["gradient_norm"].svg()


def test_a_figure_without_any_known_value_is_left_out(make_run: MakeRun) -> None:
    run = make_run()
    record = read_record(run, conf.load.load(run.config))
    names = [figure.name for figure in figures(record)]
    assert "spike_lengths" not in names, "its only spike has not ended, and a histogram needs five"
    assert "cost" not in names, "its nodes have no price"
    assert figures(read_record(make_run("new", until="created"), record.config)) == []


def test_scores_are_drawn_beside_published_models_with_errors() -> None:
    courses = courses_of([scored(1, mmlu=0.3), scored(2, mmlu=0.4)], load("hlat")).courses
    (figure,) = evaluation.evaluations(courses, Marks(restarts=[1], amendments={}, last_tokens=4.0))
    assert figure.csv().splitlines()[:3] == [
        "model,tokens,accuracy_percent,standard_error",
        "this run,1,30,1",
        "this run,2,40,1",
    ]
    svg = figure.svg()
    for name in ("this run", "HLAT-7B", "LLaMA-2-7B", "OpenLLaMA-1-7B"):
        assert f">{name}<" in svg


def test_guessing_is_a_line_and_bits_per_byte_have_figures_of_their_own() -> None:
    runs = [scored(tokens, mmlu=0.4) for tokens in (1, 2)]
    bits = replace(runs[0].scores["mmlu"], metric="bits_per_byte", value=1.25)
    scores = {"mmlu": replace(runs[0].scores["mmlu"], chance=0.25), "mmlu_bpb": bits}
    courses = courses_of([replace(run, scores=scores) for run in runs], load("hlat")).courses
    once = courses_of([replace(runs[0], scores=scores)], load("hlat")).courses
    drawn = evaluation.evaluations(once, Marks(restarts=[], amendments={}, last_tokens=4.0))
    assert [figure.name for figure in drawn] == ["evaluation_mmlu"], "one point alone is no figure"
    first, second = evaluation.evaluations(courses * 13, Marks(restarts=[], amendments={}, last_tokens=4.0))[11:13]
    assert (first.name, second.name) == ("evaluation_mmlu", "evaluation_mmlu_bpb")
    assert "The dashed line is the score of guessing, 25." in first.caption
    assert first.csv().splitlines()[-1] == "guessing,,25,"
    assert ">guessing<" in first.svg()
    assert "Less is better." in second.caption
    assert second.csv().splitlines() == [
        "model,tokens,bits per byte,standard_error",
        "this run,1,1.25,0.01",
        "this run,2,1.25,0.01",
    ]
    assert ">guessing<" not in second.svg()


def test_lengths_of_spikes_have_a_bar_for_each_length_and_one_for_the_longest() -> None:
    figure = training.spike_lengths(Spikes(count=6, steps=100, lengths_steps=[1, 1, 1, 1, 40]))
    assert figure is not None
    assert figure.csv().splitlines()[1::9] == ["1,4,80", "≥ 10,1,20"]
    assert "80 % last one step (HLAT: 86 %)" in figure.caption


def test_scaling_needs_two_sizes_and_names_the_efficiency() -> None:
    assert training.scaling(Scaling({}, {1: 10.0})) is None
    figure = training.scaling(Scaling({2: 20.0, 4: 36.0}, {4: 30.0}))
    assert figure is not None
    assert "relative to the plan for 2 nodes: 75 % on 4 nodes" in figure.caption
    assert ">linear<" in figure.svg()


def test_a_run_with_a_price_has_a_figure_of_its_cost(make_run: MakeRun) -> None:
    run = make_run()
    record = read_record(run, conf.load.load(run.config))
    record = replace(record, config=compose(["experiment=hlat_7b"]), time=replace(record.time, cost_usd=3.0))
    (cost,) = (figure for figure in figures(record) if figure.name == "cost")
    assert "of the baseline" in cost.caption
    assert [row[0] for row in cost.rows][1:] == ["plan, without failures", "baseline: p4d.24xlarge"]


def _figure() -> Figure:
    def plot(axes: Any) -> None:
        axes.plot([1, 2], [3, 4], label="a <b>")
        axes.legend()

    return Figure(name="f", caption="c", header=["x", "y"], rows=[[1, 0.1 + 0.2], [2, math.nan], [3, None]], plot=plot)


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_picture_has_its_format_and_always_the_same_bytes(suffix: str, start: bytes) -> None:
    content = _figure().picture(suffix)
    assert content.startswith(start)
    assert _figure().picture(suffix) == content


def test_csv_has_a_header_and_empty_cells_for_unknown_values() -> None:
    assert _figure().csv() == "x,y\n1,0.3\n2,\n3,\n"


def test_text_stays_text_and_is_escaped() -> None:
    assert "a &lt;b&gt;" in _figure().svg()


def test_a_missing_matplotlib_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DependencyError, match=r"pip install .*\[head\]"):
        _figure().svg()


def test_the_first_steps_of_a_run_do_not_flatten_the_rest() -> None:
    losses = [11.0, 9.0, *(2.0 + 0.001 * n for n in range(200, 0, -1))]
    limits = robust_limits(losses, losses)
    assert limits is not None
    low, high = limits
    assert low < min(losses)
    assert 2.19 < high < 2.3


def test_a_run_that_diverges_shows_it() -> None:
    losses = [2.0] * 90 + [8.0] * 10
    limits = robust_limits(losses, losses)
    assert limits is not None
    assert limits[1] > 8.0


def test_all_points_of_a_short_run_are_shown() -> None:
    limits = robust_limits([9.0, 8.0, math.nan], [9.0, 8.0, math.nan])
    assert limits is not None
    assert limits[1] > 9.0


def test_equal_values_have_a_range_and_unknown_ones_have_none() -> None:
    assert robust_limits([2.0, 2.0], [2.0, 2.0]) == pytest.approx((1.88, 2.12))
    assert robust_limits([math.nan], [math.nan]) is None


def test_an_axis_is_logarithmic_for_values_far_above_the_median_only() -> None:
    assert is_wide([0.2] * 50 + [3.0])
    assert not is_wide([0.2] * 50 + [1.0])
    assert not is_wide([0.0, 0.2, 9.0]), "zero has no logarithm"
