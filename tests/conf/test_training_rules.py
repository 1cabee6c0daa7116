"""When checkpoints are saved and deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import CheckpointConfig, Config, EvalConfig, TrainConfig
from conf.training_rules import EXIT_CODES, CheckpointPolicy

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
