"""What others have run and published, planned: the model's error stays within its goals, and nothing is refused."""

from __future__ import annotations

import dataclasses
import os
import statistics
from pathlib import Path

import pytest

from benchmarks.plan_accuracy import BEGIN, END, GOALS, cluster_of, memory_errors, scaling, step_errors, tables
from conf.compose import compose
from hlatctl.plan.execution import micro_batches, replicas, sequences
from hlatctl.plan.published import PublishedRun, points, published_runs

_PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return published_runs(cluster_of)


def test_errors_of_figures_to_which_nothing_was_fitted_are_within_the_goals(runs: list[PublishedRun]) -> None:
    assert (len(step_errors(runs)), len(memory_errors(runs))) == (62, 19)
    for errors, (median, worst) in ((step_errors(runs), GOALS["step"]), (memory_errors(runs), GOALS["memory"])):
        assert statistics.median(errors) <= median
        assert max(errors) <= worst


def test_each_number_is_fitted_to_one_figure_of_one_run(runs: list[PublishedRun]) -> None:
    fitted = [(run.device, number) for run in runs for number in run.fits]
    assert sorted(fitted) == [
        ("A100", "compute_efficiency"),
        ("H100 500 W", "asynchronous tensor parallelism"),
        ("H100 500 W", "compute_efficiency"),
        ("H100 500 W", "workspace_bytes"),
        ("H100 700 W", "compute_efficiency"),
        ("H100 700 W", "grouped products"),
        ("trn1", "collective_efficiency"),
        ("trn1", "compute_efficiency"),
    ]
    for run in runs:
        if {"compute_efficiency", "collective_efficiency"} & set(run.fits):
            assert run.step_error_fraction == pytest.approx(0.0, abs=0.001), run.name
        if run.calibrates_memory:
            assert run.memory_error_fraction == pytest.approx(0.0, abs=0.001), run.name


def test_asynchronous_tensor_parallelism_saves_what_one_pair_of_runs_shows(runs: list[PublishedRun]) -> None:
    fast = next(run for run in runs if "asynchronous tensor parallelism" in run.fits)
    slow = next(run for run in runs if run.name == fast.name.replace(", async TP", ""))
    assert fast.time.total_s / slow.time.total_s == pytest.approx(597.3 / 652.4, abs=0.001)


def test_no_published_run_of_this_decoder_is_refused(runs: list[PublishedRun]) -> None:
    """Those of the third collection keep other tensors than this decoder does, and no memory of them is published."""
    assert [run.name for run in runs if not run.memory.fits and run.collection < 3] == []


def test_more_nodes_make_each_device_slower_as_published(runs: list[PublishedRun]) -> None:
    rows = scaling(runs)
    assert len(rows) == 10
    for row in rows:
        assert 0.15 * row.published_fraction < row.planned_fraction < row.published_fraction + 0.01, row.name


def test_the_page_shows_the_errors_as_they_are(runs: list[PublishedRun]) -> None:
    before, rest = _PAGE.read_text(encoding="utf-8").split(BEGIN)
    shown, after = rest.split(END)
    if os.environ.get("HLATCTL_UPDATE_GOLDEN"):
        _PAGE.write_text(f"{before}{BEGIN}\n\n{tables(runs)}\n\n{END}{after}", encoding="utf-8")
    else:
        assert shown.strip() == tables(runs)


def test_every_run_names_its_source_and_has_the_devices_that_its_layout_needs(runs: list[PublishedRun]) -> None:
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        parallel, count = run.config.parallel, replicas(run.config, run.execution)
        shared = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * run.execution.context_parallel_size
        assert run.source, run.name
        assert count * shared == run.config.world_size, run.name
        in_all = sequences(run.config, run.execution) * micro_batches(run.config, run.execution) * count
        assert run.config.train.global_batch_size == in_all, run.name


def test_a_plan_shows_the_runs_on_trn1_and_on_its_own_cluster_s_devices() -> None:
    shown = {point.name: point for point in points(compose, "slurm_h100")}
    assert shown["Llama 3.1 8B on 32 H200, FP8"].unit == "tokens/s"
    assert shown["Llama 3.1 8B on 8 H100, compiled"].calibrates
    assert "MFU of 7B on 64 nodes" in shown
    assert not any("A100" in name for name in shown)


def test_a_number_that_is_not_fitted_moves_the_errors(runs: list[PublishedRun]) -> None:
    run = next(run for run in runs if run.calibrates)
    hardware = dataclasses.replace(run.config.cluster.hardware, compute_efficiency=0.5)
    cluster = dataclasses.replace(run.config.cluster, hardware=hardware)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, cluster=cluster))
    assert abs(other.step_error_fraction) > 0.1
