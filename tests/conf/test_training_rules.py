"""Learning rates, and when checkpoints are saved and deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import CheckpointConfig, Config, EvalConfig, OptimizerConfig, TrainConfig
from conf.training_rules import EXIT_CODES, CheckpointPolicy, learning_rate


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


STEP_TOKENS = 4 * 32


def config_of(steps: int = 24, eval_steps: int = 6, permanent_steps: int = 7, every_steps: int = 4) -> Config:
    return replace(
        Config(),
        train=TrainConfig(tokens=steps * STEP_TOKENS, global_batch_size=4, seq_len=32),
        eval=EvalConfig(enabled=bool(eval_steps), every_tokens=(eval_steps or 1) * STEP_TOKENS),
        checkpoint=CheckpointConfig(
            every_steps=every_steps, keep=2, keep_every_tokens=permanent_steps * STEP_TOKENS or None
        ),
    )


def test_the_most_important_reason_is_given() -> None:
    policy = CheckpointPolicy(config_of(every_steps=3))
    reasons = {step: reason for step in range(1, 25) if (reason := policy.reason_to_save(step))}
    assert reasons == {
        3: "interval",
        6: "milestone",
        7: "permanent",
        9: "interval",
        12: "milestone",
        14: "permanent",
        15: "interval",
        18: "milestone",
        21: "permanent",
        24: "final",
    }


def test_a_request_to_stop_saves_any_step_and_the_last_one_is_final_all_the_same() -> None:
    policy = CheckpointPolicy(config_of())
    assert [policy.reason_to_save(step, stopping=True) for step in (5, 6, 24)] == ["stop", "stop", "final"]


@given(
    steps=st.integers(1, 60),
    eval_steps=st.integers(0, 20),
    permanent_steps=st.integers(0, 20),
    every_steps=st.integers(1, 20),
    begin=st.integers(0, 59),
)
def test_the_next_save_is_the_next_step_with_a_reason(
    steps: int, eval_steps: int, permanent_steps: int, every_steps: int, begin: int
) -> None:
    config = config_of(steps, eval_steps, permanent_steps, every_steps)
    policy, begin = CheckpointPolicy(config), min(begin, steps - 1)
    assert policy.next_save(begin) == next(s for s in range(begin + 1, steps + 1) if policy.reason_to_save(s))


@pytest.mark.parametrize(
    ("steps", "verified", "evaluated", "deleted"),
    [
        ([4, 8], [4, 8], [], set()),
        ([4, 8, 16], [4, 8, 16], [], {4}),
        ([4, 7, 8, 14, 16, 20], [4, 8], [], {4}),  # 7 and 14 are permanent, 8 is the newest verified one
        ([4, 7, 8, 14, 16, 20], [4, 8, 16, 20], [], {4, 8}),
        ([4, 6, 8, 12, 16], [4, 6, 8, 12, 16], [6], {4, 6}),  # 12 is a milestone without an evaluation
        ([4, 6, 8, 12, 16], [4, 6, 8, 12, 16], [6, 12], {4, 6, 8}),
        ([4, 8, 16], [], [], {4}),
    ],
)
def test_the_newest_the_permanent_and_the_pending_stay(
    steps: list[int], verified: list[int], evaluated: list[int], deleted: set[int]
) -> None:
    tokens = {step * STEP_TOKENS for step in evaluated}
    assert (
        CheckpointPolicy(config_of()).to_delete(steps, verified=verified, is_evaluated=tokens.__contains__) == deleted
    )


def test_exit_codes_are_those_that_schedulers_and_old_runs_know() -> None:
    assert EXIT_CODES == {"finished": 0, "stop": 75, "rollback": 76, "amend": 77}
