"""Pace of training: the time left is computed from recent steps, not from a slow start, and over all stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Config, EvalConfig, HardwareConfig, StageConfig, TrainConfig
from hlatctl.plan.pace import seconds_per_step, training_left_s
from hlatctl.plan.step_time import step_time_s
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event

PLAIN = Config(train=TrainConfig(max_steps=100))


def event(kind: str, attempt: int = 1, **fields: Any) -> Event:
    return {"kind": kind, "seq": 1, "time_unix_s": 0.0, "attempt": attempt, **fields}


def attempt(number: int, resumed_from_step: int, times_s: list[float]) -> list[Event]:
    steps = [
        event("step", number, step=resumed_from_step + place, tokens=1, step_s=step_s)
        for place, step_s in enumerate(times_s, start=1)
    ]
    return [
        event("attempt_started", number, handle={}),
        event("train_started", number, resumed_from_step=resumed_from_step),
        *steps,
    ]


def test_the_steps_that_compile_do_not_count() -> None:
    times_s = [107.0, 9.0, 1.0, 1.0]
    paces = [seconds_per_step(fold(attempt(1, 0, times_s[:steps])), PLAIN) for steps in range(5)]
    assert paces == [None, None, None, None, 1.0]
    assert training_left_s(fold(attempt(1, 0, times_s)), PLAIN) == 96.0


def test_after_a_restart_earlier_steps_give_the_pace() -> None:
    restarted = [*attempt(1, 0, [60.0, 60.0, 2.0, 2.0, 2.0]), *attempt(2, 5, [60.0, 60.0])]
    assert seconds_per_step(fold(restarted), PLAIN) == 2.0


def test_the_pace_is_that_of_the_newest_steps_and_no_slow_one_changes_it() -> None:
    state = fold(attempt(1, 0, [1.0] * 50 + [3.0] * 19 + [400.0]))
    assert seconds_per_step(state, PLAIN) == seconds_per_step(state, None) == 3.0


def test_nothing_is_left_of_a_run_that_has_made_its_steps() -> None:
    assert training_left_s(fold(attempt(1, 0, [1.0] * 9)), replace(PLAIN, train=TrainConfig(max_steps=9))) is None


def staged() -> Config:
    """Ten steps of 8 sequences, then ten of 4, then ten of 8 that are twice as long; 512 tokens a step at first."""
    stages = [
        StageConfig(name="pre", tokens=5120),
        StageConfig(name="mid", tokens=2560, set={"train.global_batch_size": 4}),
        StageConfig(name="long", tokens=10240, set={"train.global_batch_size": 8, "train.seq_len": 128}),
    ]
    return Config(
        train=TrainConfig(stages=stages, global_batch_size=8, seq_len=64), eval=EvalConfig(enabled=False, suite="smoke")
    )


def test_the_time_left_counts_the_steps_of_later_stages_by_their_own_size() -> None:
    config = staged()
    state = fold(attempt(1, 0, [1.0] * 6))
    left_s = training_left_s(state, config)
    assert left_s is not None
    assert left_s == pytest.approx(4 + 10 * 0.5 + 10 * 2, rel=0.04), "attention makes long sequences a bit slower"
    assert left_s > 29
    assert training_left_s(state, config, 15) == pytest.approx(4 + 5 * 0.5)


def test_after_a_boundary_steps_of_the_stage_before_count_by_their_size() -> None:
    config = staged()
    just_after = fold([*attempt(1, 0, [1.0] * 10), *attempt(2, 10, [9.0, 9.0, 0.5])])
    assert seconds_per_step(just_after, config) == pytest.approx(0.5)
    assert training_left_s(just_after, config) == pytest.approx(7 * 0.5 + 10 * 2, rel=0.04)


def test_known_hardware_gives_the_ratios_of_the_plan() -> None:
    hardware = HardwareConfig(fp32_flops_per_s=1e12, memory_bytes_per_s=1e10, link_bytes_per_s=1e10)
    config = staged()
    config = replace(config, cluster=replace(config.cluster, hardware=hardware))
    times_s = [step_time_s(stage.config) for stage in config.stages]
    assert None not in times_s
    first_s, *others_s = [time_s or 0.0 for time_s in times_s]
    expected_s = 4 + sum(10 * other_s / first_s for other_s in others_s)
    assert training_left_s(fold(attempt(1, 0, [1.0] * 6)), config) == pytest.approx(expected_s)
