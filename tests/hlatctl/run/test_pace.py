"""Pace: the remaining time is computed from recent answers, not from a slow start."""

from __future__ import annotations

from typing import Any

from hlatctl.run.fold import fold
from hlatctl.run.journal import Event
from hlatctl.run.pace import task_left_s
from hlatctl.run.state import EvaluationProgress


def event(kind: str, attempt: int = 1, time_unix_s: float = 0.0, **fields: Any) -> Event:
    return {"kind": kind, "seq": 1, "time_unix_s": time_unix_s, "attempt": attempt, **fields}


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
