"""Learning rates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schedule import learning_rate
from conf.schema import Config, OptimizerConfig, TrainConfig


def _config(steps: int, *, lr: float = 3e-4, **optimizer: Any) -> Config:
    """As many steps of 10 tokens."""
    return Config(
        train=TrainConfig(tokens=10 * steps, global_batch_size=1, seq_len=10),
        optimizer=OptimizerConfig(lr=lr, **optimizer),
    )


def _rates(config: Config) -> list[float]:
    return [learning_rate(step, config) for step in range(1, config.total_steps + 1)]


def test_rate_of_the_paper_rises_peaks_and_falls_to_a_tenth() -> None:
    config = _config(430_000, warmup_steps=2000)
    rates = [learning_rate(step, config) for step in (1, 1000, 2000, 216_000, 430_000)]
    assert rates == pytest.approx([1.5e-7, 1.5e-4, 3e-4, 1.65e-4, 3e-5])


def test_without_warm_up_the_first_step_is_just_below_the_peak() -> None:
    config = _config(1000, lr=1.0, min_lr_fraction=0.5, warmup_steps=0)
    assert learning_rate(1, config) == pytest.approx(1.0, rel=1e-5)
    assert learning_rate(1000, config) == pytest.approx(0.5)


def test_warm_up_may_be_said_in_tokens() -> None:
    assert _rates(_config(100, warmup_tokens=195)) == _rates(_config(100, warmup_steps=20))


def test_linear_falls_by_the_same_amount_each_step() -> None:
    rates = _rates(_config(20, lr=1.0, schedule="linear", min_lr_fraction=0.0, warmup_steps=10))
    assert rates[9:] == pytest.approx([1.0 - 0.1 * n for n in range(11)])


def test_wsd_stays_at_the_peak_until_its_last_share() -> None:
    config = _config(100, lr=1.0, schedule="wsd", warmup_steps=10, wsd_decay_fraction=0.2, min_lr_fraction=0.0)
    rates = _rates(config)
    assert rates[9:80] == [1.0] * 71
    assert rates[80:] == pytest.approx([1.0 - 0.05 * n for n in range(1, 21)])


@given(warmup=st.integers(0, 50), total=st.integers(1, 200), schedule=st.sampled_from(["cosine", "linear", "wsd"]))
def test_rate_never_rises_after_the_warm_up_and_is_always_positive(warmup: int, total: int, schedule: str) -> None:
    config = _config(total, warmup_steps=warmup, schedule=schedule)
    rates = _rates(config)
    assert all(0 < rate <= config.optimizer.lr for rate in rates)
    tail = rates[max(0, warmup - 1) :]
    assert tail == sorted(tail, reverse=True)
    if warmup < total:
        assert tail[-1] == pytest.approx(config.optimizer.lr / 10)
