"""Pace: the remaining time is computed from recent steps and answers, not from a slow start."""

from __future__ import annotations

from typing import Any

from hlatctl.run.fold import fold
from hlatctl.run.journal import Event
from hlatctl.run.pace import seconds_per_step, task_left_s, training_left_s
from hlatctl.run.state import EvaluationProgress


def event(kind: str, attempt: int = 1, time_unix_s: float = 0.0, **fields: Any) -> Event:
    return {"kind": kind, "seq": 1, "time_unix_s": time_unix_s, "attempt": attempt, **fields}


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
    paces = [seconds_per_step(fold(attempt(1, 0, times_s[:steps]))) for steps in range(5)]
    assert paces == [None, None, None, None, 1.0]
    assert training_left_s(fold(attempt(1, 0, times_s)), 100) == 96.0


def test_after_a_restart_earlier_steps_give_the_pace() -> None:
    restarted = [*attempt(1, 0, [60.0, 60.0, 2.0, 2.0, 2.0]), *attempt(2, 5, [60.0, 60.0])]
    assert seconds_per_step(fold(restarted)) == 2.0


def test_the_pace_is_that_of_the_newest_steps_and_no_slow_one_changes_it() -> None:
    assert seconds_per_step(fold(attempt(1, 0, [1.0] * 50 + [3.0] * 19 + [400.0]))) == 3.0


def test_nothing_is_left_of_a_run_that_has_made_its_steps() -> None:
    assert training_left_s(fold(attempt(1, 0, [1.0] * 9)), 9) is None


def progress(*counts: tuple[float, int]) -> EvaluationProgress:
    common = {"milestone_tokens": 10, "attempt": 0}
    events = [
        event("eval_started", **common, step=1, tasks=["gsm8k"]),
        event("eval_task_started", **common, task="gsm8k"),
        *(event("eval_progress", **common, time_unix_s=at, task="gsm8k", done=done, total=40) for at, done in counts),
    ]
    progress = fold(events).milestones[10].progress
    assert progress is not None
    return progress


def test_the_first_answer_waits_for_the_model_and_is_no_pace() -> None:
    assert task_left_s(progress((0.0, 0))) is None
    assert task_left_s(progress((0.0, 0), (260.0, 1))) is None
    assert task_left_s(progress((0.0, 0), (260.0, 1), (265.0, 6))) == 34.0


def test_answers_of_an_earlier_try_are_no_pace() -> None:
    assert task_left_s(progress((0.0, 20), (30.0, 21), (40.0, 26))) == 28.0


def test_an_evaluation_keeps_few_counts_and_a_count_that_goes_back_begins_anew() -> None:
    many = progress(*((float(second), second // 100) for second in range(3000)))
    assert len(many.counted) == 30
    assert progress((0.0, 0), (5.0, 8), (9.0, 12), (10.0, 10)).counted == [(10.0, 10)]
