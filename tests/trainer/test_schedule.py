from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import OptimizerConfig
from trainer.schedule import learning_rate

_HLAT = OptimizerConfig(lr=3e-4, min_lr_fraction=0.1, warmup_steps=2000)


def test_rate_of_the_paper_rises_peaks_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, _HLAT, total_steps=430_000) for step in (1, 1000, 2000, 216_000, 430_000)]
    assert rates == pytest.approx([1.5e-7, 1.5e-4, 3e-4, 1.65e-4, 3e-5])


def test_without_warm_up_the_first_step_is_just_below_the_peak() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_fraction=0.5, warmup_steps=0)
    assert learning_rate(1, config, total_steps=1000) == pytest.approx(1.0, rel=1e-5)
    assert learning_rate(1000, config, total_steps=1000) == pytest.approx(0.5)


@given(warmup=st.integers(0, 50), total=st.integers(1, 200))
def test_rate_never_rises_after_the_warm_up_and_is_always_positive(warmup: int, total: int) -> None:
    config = OptimizerConfig(warmup_steps=warmup)
    rates = [learning_rate(step, config, total_steps=total) for step in range(1, total + 1)]
    assert all(0 < rate <= config.lr for rate in rates)
    tail = rates[max(0, warmup - 1) :]
    assert tail == sorted(tail, reverse=True)
