"""What others have run and published, planned: the model's error stays within its goals, and nothing is refused."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from conf.compose import compose
from hlatctl.plan.published import points
from hlatctl.plan.published_runs import PublishedRun, published_runs
from tests.benchmarks.plan_accuracy import GOALS, cluster_of, percent


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return published_runs(cluster_of)


def test_step_times_of_published_runs_are_within_the_goals(runs: list[PublishedRun]) -> None:
    errors = percent(run.step_error_fraction for run in runs if not run.further)
    assert len(errors) == 21
    assert statistics.median(errors) <= GOALS["median"]
    assert max(errors) <= GOALS["worst"]


def test_only_four_numbers_are_fitted_to_step_times_and_each_to_a_point_of_its_own(runs: list[PublishedRun]) -> None:
    fitted = [run for run in runs if run.calibrates]
    assert [run.device for run in fitted] == ["trn1", "trn1", "H100 500 W", "A100"]
    assert percent(run.step_error_fraction for run in fitted) == pytest.approx([0, 0, 0, 0], abs=0.1)
    predicted = percent(run.step_error_fraction for run in runs if not run.calibrates and not run.further)
    assert statistics.median(predicted) <= GOALS["median"], "without the points that were fitted"


def test_runs_that_were_found_later_are_within_the_worst_goal_too(runs: list[PublishedRun]) -> None:
    errors = percent(run.step_error_fraction for run in runs if run.further)
    assert len(errors) == 9
    assert max(errors) <= GOALS["worst"]


def test_memory_of_published_runs_is_within_the_goal_and_none_is_refused(runs: list[PublishedRun]) -> None:
    errors = percent(run.memory_error_fraction for run in runs)
    assert len(errors) == 12
    assert max(errors) <= GOALS["memory"]
    assert all(run.memory.fits for run in runs)


def test_every_run_names_its_source_and_has_the_devices_that_its_layout_needs(runs: list[PublishedRun]) -> None:
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        parallel, train = run.config.parallel, run.config.train
        replicas = run.config.data_parallel_size
        assert run.source, run.name
        assert replicas * parallel.tensor_parallel_size * parallel.pipeline_parallel_size == run.config.world_size
        assert train.global_batch_size == run.config.micro_batch_size * run.config.grad_accum_steps * replicas, run.name


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
