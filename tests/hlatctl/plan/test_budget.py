"""Counts, checkpoint intervals, money and volumes against figures worked out by hand or published; repeated sources."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.schema import BaselineConfig, ClusterConfig, Config, TrackingConfig
from conf.sizes import checkpoint_bytes, flops_per_token
from hlatctl.plan.budget import budget, cost, daly_s, epochs, least_time_between_failures_s, volume, young_s
from hlatctl.plan.sections import corpus_section
from tests.conf.test_sizes import LLAMA_7B


def test_flops_per_token_of_7b() -> None:
    # 6 x (6,738,415,616 - 32,000 x 4,096) + 12 x 32 x 4,096 x 4,096
    assert flops_per_token(LLAMA_7B, 4096) == 39_644_061_696 + 6_442_450_944


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


def test_a_run_costs_its_nodes_hours(hlat_7b: Config) -> None:
    costs = cost(hlat_7b, 3600.0)
    assert costs.node_hours == 429_154 * 64
    assert costs.accelerator_hours == 429_154 * 64 * 32
    assert costs.days == 429_154 / 24
    assert costs.usd == pytest.approx(429_154 * 64 * 21.5)
    assert costs.usd_per_4m_tokens == pytest.approx(64 * 21.5 * 4_000_000 / 4_194_304)


def test_the_paper_s_mfu_costs_54_percent_of_the_baseline(hlat_7b: Config) -> None:
    # 4.19 M tokens x 46.09 GFLOP / (64 nodes x 3,040 TFLOP/s x 27.9 %)
    costs = cost(hlat_7b, 4_194_304 * 46_086_512_640 / (64 * 3.04e15 * 0.279))
    assert costs.of_baseline_fraction == pytest.approx(0.54, abs=0.002)


def test_without_prices_there_are_no_dollars() -> None:
    costs = cost(Config(cluster=ClusterConfig(baseline=BaselineConfig(name="other", mfu_fraction=0.5))), 1.0)
    assert (costs.usd, costs.usd_per_4m_tokens, costs.baseline_usd_per_4m_tokens) == (None, None, None)
    assert costs.of_baseline_fraction is None


def test_volumes_follow_from_steps(hlat_7b: Config) -> None:
    volumes = volume(hlat_7b, 4.0)
    assert volumes.loader_tokens_per_s == 4_194_304 / 4.0 / 256
    assert volumes.checkpoint_every_s == 4000.0
    assert volumes.checkpoint_bytes_per_s == checkpoint_bytes(hlat_7b) / 4000.0
    # The newest five, and a permanent one each 100 B tokens; those at each 200 B tokens are milestones too.
    needs = budget(hlat_7b)
    assert needs["checkpoints_kept"] == 5 + 18
    assert needs["disk_bytes"] == 24 * checkpoint_bytes(hlat_7b)
    assert volumes.journal_bytes == 429_154 * 387
    untracked = dataclasses.replace(hlat_7b, tracking=TrackingConfig(enabled=False))
    assert (volume(untracked, None).mlflow_bytes, volume(untracked, None).loader_tokens_per_s) == (0, None)


MIXTURE = ["data.sources=[{path:/a,weight:3},{path:/b,weight:1}]", "train.tokens=4096000", "train.global_batch_size=8"]


def test_each_source_is_counted_by_its_share_of_the_tokens() -> None:
    dataset = {"sources": [{"path": "/a", "estimated_tokens": 3_072_000}, {"path": "/b", "estimated_tokens": 100_000}]}
    sources = epochs(compose(MIXTURE), dataset)
    assert [source.count for source in sources] == pytest.approx([1.0, 10.24])
    assert sources[0].warning == ""
    assert sources[1].warning == (
        "data: the run trains on /b about 10 times: 1,024,000 tokens from a corpus of about 100,000; repeats beyond 4 "
        "add little (arXiv 2305.16264)"
    )
    assert [figure.text for figure in corpus_section(sources).figures] == [
        "3,072,000 (from a sample)",
        "1",
        "100,000 (from a sample)",
        "10 (more than 4 add little)",
    ]


RECIPES = ("fineweb_edu", "dclm_baseline", "dolma3", "olmo2", "olmo3")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_tokens_of_its_sources(name: str) -> None:
    config = compose([f"data={name}", "train.tokens=1T", "eval.every_tokens=100B"], to_start=False)
    (first, *_) = sources = epochs(config, {})
    assert all(source.source.startswith("hf://datasets/") and source.tokens >= 50e9 for source in sources)
    assert corpus_section(sources).figures[0].text == f"{first.tokens:,} (published)"
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, tokens=50_000_000_000_000))
    assert (first.warning, any(source.warning for source in epochs(longer, {}))) == ("", True)


def test_a_run_of_stages_reads_each_of_its_mixes_once() -> None:
    config = compose(["experiment=olmo3_7b"], to_start=False)
    assert [source.count for source in epochs(config, {})] == pytest.approx([1.0] * 3, abs=1e-3)


@pytest.mark.parametrize("dataset", [{}, {"sources": [{"path": "/a"}, {"path": "/b"}]}, {"sources": []}])
def test_a_corpus_without_counted_tokens_has_no_epochs(dataset: dict[str, object]) -> None:
    assert epochs(compose(MIXTURE), dataset) == []
