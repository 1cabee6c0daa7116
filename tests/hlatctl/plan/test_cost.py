"""Money and volumes, against figures worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from conf.schema import BaselineConfig, ClusterConfig, Config, TrackingConfig
from conf.sizes import checkpoint_bytes
from hlatctl.plan.cost import cost
from hlatctl.plan.volume import volume


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
    assert volumes.checkpoints_kept == 5 + 18
    assert volumes.disk_bytes == 24 * checkpoint_bytes(hlat_7b)
    assert volumes.journal_bytes == 429_154 * 387
    untracked = dataclasses.replace(hlat_7b, tracking=TrackingConfig(enabled=False))
    assert (volume(untracked, None).mlflow_bytes, volume(untracked, None).loader_tokens_per_s) == (0, None)
