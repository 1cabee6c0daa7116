"""The queue of evaluations: which milestones wait, forecasts from measured times, and its description in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conf.schema import Config, EvalConfig, TrainConfig
from hlatctl.report.eval_queue import (
    EvaluationQueue,
    TaskForecast,
    behind_text,
    evaluation_queue,
    forecast_text,
    left_s,
    task_forecast,
    tasks_text,
    waiting_text,
)
from hlatctl.run.fold import fold
from tests.hlatctl.report.made_up import Journal

#: Ten steps of ten tokens, a milestone every two of them; a step takes 10 s.
CONFIG = Config(
    train=TrainConfig(max_steps=10, global_batch_size=2, micro_batch_size=1, seq_len=5),
    eval=EvalConfig(every_tokens=20),
)
STEP_S, INTERVAL_S = 10.0, 20.0


class Run(Journal):
    """A journal of training at a constant pace, with evaluations."""

    def train_to(self, step: int) -> None:
        """Train without a pause from the first step; milestones are due as they are reached."""
        self.start(0.0)
        for each in range(1, step + 1):
            at_s = each * STEP_S
            self.train(at_s, "step", step=each, tokens=10 * each, step_s=STEP_S)
            if each % 2 == 0:
                self.evaluation(at_s, "milestone", each)

    def evaluation(self, time_s: float, kind: str, step: int, **fields: Any) -> None:
        self.add(time_s, kind, milestone_tokens=10 * step, step=step, contract="own", **fields)

    def evaluate(self, time_s: float, step: int, *, wall_s: float) -> None:
        self.evaluation(time_s, "eval_taken", step)
        self.evaluation(time_s, "eval_started", step, tasks=["mmlu", "gsm8k"])
        for number, task in enumerate(("mmlu", "gsm8k"), start=1):
            self.evaluation(time_s + (number - 1) * wall_s / 2, "eval_task_started", step, task=task)
            self.evaluation(time_s + number * wall_s / 2, "eval_task_finished", step, task=task, scores={})
        self.evaluation(time_s + wall_s, "eval_finished", step, scores={})

    def queue(self, now_s: float, config: Config = CONFIG) -> EvaluationQueue:
        return evaluation_queue(fold(self.events), config, 1e9 + now_s)


@pytest.fixture
def run() -> Run:
    return Run()


def test_milestones_wait_from_their_checkpoint_until_an_evaluator_takes_them(run: Run) -> None:
    run.train_to(6)
    queue = run.queue(60.0)
    assert (queue.waiting, queue.running, queue.tokens_behind) == ((20, 40, 60), (), 40)
    assert queue.oldest_waiting_since_unix_s == 1e9 + 20.0
    run.evaluation(60.0, "eval_taken", 2)
    queue = run.queue(60.0)
    assert (queue.waiting, queue.running, queue.oldest_waiting_since_unix_s) == ((40, 60), (20,), 1e9 + 40.0)


def test_nothing_is_forecast_before_the_first_evaluation(run: Run) -> None:
    run.train_to(4)
    queue = run.queue(40.0)
    assert (queue.evaluation_s, queue.ratio, queue.caught_up_s, queue.all_evaluated_s) == (None,) * 4
    assert queue.interval_s == INTERVAL_S


def test_an_evaluation_that_takes_twice_the_interval_ends_after_training(run: Run) -> None:
    run.train_to(6)
    run.evaluate(20.0, 2, wall_s=40.0)
    run.evaluation(60.0, "eval_taken", 4)
    queue = run.queue(60.0)
    assert (queue.evaluation_s, queue.ratio) == (40.0, 2.0)
    # Milestone 40 until 40 s from now, then 60, 80 and 100, each 40 s; training ends in 40 s.
    assert (queue.caught_up_s, queue.all_evaluated_s, queue.after_training_s) == (120.0, 160.0, 120.0)


def test_two_evaluations_at_once_keep_up(run: Run) -> None:
    run.train_to(6)
    run.evaluate(20.0, 2, wall_s=30.0)
    config = dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, concurrent=2))
    queue = run.queue(60.0, config)
    assert queue.ratio == 0.75
    assert (queue.waiting, queue.caught_up_s) == ((40, 60), 0.0)


def test_training_that_waits_for_evaluations_brings_no_milestone_meanwhile(run: Run) -> None:
    run.train_to(4)
    run.evaluate(20.0, 2, wall_s=10.0)
    config = dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, placement="between"))
    queue = run.queue(40.0, config)
    assert (queue.waiting, queue.caught_up_s, queue.all_evaluated_s) == ((40,), 0.0, 10.0)


def test_a_running_evaluation_has_the_usual_time_of_its_tasks_left(run: Run) -> None:
    run.train_to(4)
    run.evaluate(20.0, 2, wall_s=40.0)
    run.evaluation(60.0, "eval_started", 4, tasks=["mmlu", "gsm8k"])
    run.evaluation(60.0, "eval_task_started", 4, task="mmlu")
    run.evaluation(61.0, "eval_progress", 4, task="mmlu", done=0, total=8)
    run.evaluation(65.0, "eval_progress", 4, task="mmlu", done=1, total=8)
    state = fold(run.events)
    tasks = task_forecast(state, state.milestones[40])
    assert [(task.task, task.wall_s, task.left_s) for task in tasks] == [("mmlu", 20.0, 15.0), ("gsm8k", 20.0, 20.0)]
    assert left_s(tasks) == 35.0
    run.evaluation(80.0, "eval_task_finished", 4, task="mmlu", scores={})
    tasks = task_forecast(state := fold(run.events), state.milestones[40])
    assert [task.left_s for task in tasks] == [0.0, 20.0]
    assert [task.left_s for task in task_forecast(state)] == [20.0, 20.0], "those of the next evaluation"


def test_a_task_that_an_earlier_try_began_says_nothing_about_its_time(run: Run) -> None:
    run.train_to(2)
    run.evaluation(20.0, "eval_taken", 2)
    run.evaluation(20.0, "eval_started", 2, tasks=["mmlu"])
    run.evaluation(20.0, "eval_task_started", 2, task="mmlu")
    run.evaluation(21.0, "eval_progress", 2, task="mmlu", done=7, total=8)
    run.evaluation(22.0, "eval_task_finished", 2, task="mmlu", scores={})
    run.evaluation(22.0, "eval_finished", 2, scores={})
    assert fold(run.events).milestones[20].task_wall_s == {}


def test_an_interrupted_evaluation_waits_again(run: Run) -> None:
    run.train_to(2)
    run.evaluation(21.0, "eval_taken", 2)
    run.evaluation(22.0, "eval_stopped", 2)
    assert run.queue(30.0).waiting == (20,)


def test_one_alarm_counts_until_no_milestone_waits(run: Run) -> None:
    run.train_to(4)
    run.add(40.0, "alarm", what="evaluation_behind", message="behind", step=4)
    assert fold(run.events).evaluation_behind
    run.evaluate(41.0, 2, wall_s=1.0)
    assert fold(run.events).evaluation_behind, "one still waits"
    run.evaluate(43.0, 4, wall_s=1.0)
    assert not fold(run.events).evaluation_behind


def queue_of(**fields: Any) -> EvaluationQueue:
    unknown = dict.fromkeys(("oldest_waiting_since_unix_s", "evaluation_s", "interval_s", "ratio"))
    unknown |= dict.fromkeys(("caught_up_s", "all_evaluated_s", "after_training_s"))
    return EvaluationQueue(**{**unknown, "waiting": (), "running": (), "tokens_behind": 0, **fields})


def test_the_line_of_waiting_milestones_says_since_when_and_how_far_behind() -> None:
    queue = queue_of(waiting=(200, 400), tokens_behind=600_000_000_000, oldest_waiting_since_unix_s=1_700_000_000.0)
    expected = "2 milestones, the oldest since 2023-11-14 22:13:20 UTC; 600B tokens behind training"
    assert waiting_text(queue) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"evaluation_s": 7200.0}, "2 h 0 min a milestone"),
        (
            {"evaluation_s": 7200.0, "interval_s": 3600.0, "ratio": 2.0, "waiting": (1,), "caught_up_s": 60.0},
            "2 h 0 min a milestone, 2 times the 1 h 0 min between two, caught up in 1 min 0 s",
        ),
    ],
)
def test_the_forecast_says_what_is_known(fields: dict[str, Any], expected: str) -> None:
    assert forecast_text(queue_of(**fields)) == expected


def test_the_longest_tasks_are_named_and_the_others_are_a_sum() -> None:
    tasks = [TaskForecast(task=f"t{number}", wall_s=60.0 * number, left_s=60.0 * number) for number in range(1, 7)]
    assert tasks_text(tasks) == (
        "21 min 0 s left: t6 6 min 0 s, t5 5 min 0 s, t4 4 min 0 s, t3 3 min 0 s, 2 other tasks 3 min 0 s"
    )
    tasks.append(TaskForecast(task="new", wall_s=None, left_s=None))
    assert tasks_text(tasks).endswith("; 1 task of unknown time")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "how long one takes is unknown until the first is evaluated"),
        ({"ratio": 0.5, "evaluation_s": 60.0, "interval_s": 120.0, "caught_up_s": 90.0}, "caught up in 1 min 30 s"),
        ({"ratio": 2.0, "evaluation_s": 240.0, "interval_s": 120.0, "after_training_s": 60.0}, "ends 1 min 0 s after"),
    ],
)
def test_the_alarm_says_what_is_known(fields: dict[str, Any], expected: str) -> None:
    text = behind_text(queue_of(waiting=(1, 2), **fields))
    assert text.startswith("2 milestones wait for evaluation")
    assert expected in text
