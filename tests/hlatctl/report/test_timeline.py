"""Wall time of made-up journals: every second belongs to one category."""

from __future__ import annotations

import pytest

from tests.hlatctl.report.made_up import Journal, goodput_of, interrupted, journal  # noqa: F401


def test_an_undisturbed_run_is_split_by_category(journal: Journal) -> None:
    journal.add(1, "stage_started", stage="compile")
    journal.add(41, "stage_finished", stage="compile", wall_s=40)
    journal.add(41, "stage_started", stage="warm_cache")
    journal.add(43, "stage_finished", stage="warm_cache", wall_s=2)
    journal.start(44)
    journal.step(60, 1)
    journal.step(70, 2, data_wait_s=3.0)
    journal.saved(74, 2, wall_s=4.0)
    journal.step(84, 3)
    journal.train(85, "train_stopped", step=3, reason="finished")
    journal.add(85.5, "milestone", milestone_tokens=3, step=3)
    journal.end(86, "finished")
    journal.add(87, "eval_started", writer="eval-3", milestone_tokens=3, step=3)
    journal.add(97, "eval_finished", writer="eval-3", milestone_tokens=3, step=3)
    journal.add(98, "run_finished", outcome="finished")
    assert journal.seconds == {
        "productive": 27.0,
        "data_wait": 3.0,
        "checkpoint_stall": 4.0,
        "between_steps": 1.0,
        "compile": 40.0,
        "warm_cache": 2.0,
        "start": 6.0,
        "end": 0.5,
        "evaluation_wait": 11.5,
        "head": 3.0,
    }


@pytest.mark.parametrize("cause", ["killed", "hang", "a future cause"])
def test_the_time_of_a_restart_is_named_after_its_cause(journal: Journal, cause: str) -> None:
    interrupted(journal, cause)
    assert journal.seconds == {
        "productive": 40.0,
        "checkpoint_stall": 1.0,
        "between_steps": 5.0,
        "lost": 20.0,
        "start": 5.0,
        f"restart:{cause}": 19.0,
        "head": 10.0,
    }


def test_steps_are_lost_only_once_they_are_redone(journal: Journal) -> None:
    interrupted(journal)
    before = journal.events[: [event["kind"] for event in journal.events].index("attempt_ended")]
    assert "lost" not in goodput_of(before).seconds


def test_an_attempt_without_steps_adds_its_own_cause(journal: Journal) -> None:
    interrupted(journal)
    journal.end(103, "crashed", "restart", attempt=2)
    journal.start(110, attempt=3, resumed_from_step=2)
    journal.end(120, "out_of_memory", "restart", attempt=3)
    journal.start(130, attempt=4, resumed_from_step=2)
    journal.step(150, 3, attempt=4)
    seconds = journal.seconds
    assert seconds["restart:crashed"] == 15.0
    assert seconds["restart:out_of_memory"] == 25.0


def test_time_without_a_driver_is_idle_unless_training_continues(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.step(40, 2)
    # The driver dies and restarts at 55 while training continues. Then all processes die, until 500.
    journal.step(50, 3)
    journal.add(55, "head_started", pid=2)
    journal.step(60, 4)
    journal.add(500, "head_started", pid=3)
    journal.end(502, "lost", "restart")
    journal.start(503, attempt=2, resumed_from_step=0)
    journal.step(518, 1, attempt=2)
    seconds = journal.seconds
    assert seconds["idle"] == 440.0
    assert seconds["lost"] == 40.0
    assert seconds["restart:lost"] == 8.0
    assert "between_steps" not in seconds


def test_a_run_that_was_stopped_overnight_is_idle(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.add(31, "stop_requested", writer="operator")
    journal.saved(33, 1, wall_s=2.0)
    journal.train(33, "train_stopped", step=1, reason="stop")
    journal.end(34, "stopped", "stop")
    journal.add(35, "run_finished", outcome="stopped")
    journal.add(35, "stage_started", stage="report")
    journal.add(36, "stage_finished", stage="report")
    journal.add(36036, "head_started", pid=2)
    journal.add(36037, "stage_started", stage="preflight")
    journal.add(36040, "stage_finished", stage="preflight")
    journal.start(36040, attempt=2, resumed_from_step=1)
    journal.step(36055, 2, attempt=2)
    assert journal.seconds == {
        "productive": 20.0,
        "checkpoint_stall": 2.0,
        "between_steps": 1.0,
        "start": 10.0,
        "restart:stopped": 6.0,
        "report": 1.0,
        "preflight": 3.0,
        "head": 12.0,
        "idle": 36000.0,
    }
    goodput = goodput_of(journal.events)
    assert goodput.checkpointing.failures == {}
    assert goodput.ettr_fraction == pytest.approx(20 / 36045)


def test_a_later_evaluation_of_a_finished_run_adds_no_time(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.end(34, "finished", "done")
    journal.add(35, "run_finished", outcome="finished")
    before = goodput_of(journal.events)
    journal.add(90_000, "eval_started", writer="eval-10")
    assert goodput_of(journal.events) == before
    journal.add(90_035, "head_started", pid=2)
    assert goodput_of(journal.events).wall_s == 90_035.0, "a new driver adds time"


def test_an_asynchronous_save_counts_only_its_stall_after_its_step(journal: Journal) -> None:
    journal.start(10)
    for step, time_s in ((1, 30.0), (2, 40.0), (3, 51.0), (4, 61.0)):
        journal.step(time_s, step)
        if step == 3:
            journal.saved(58, 2, wall_s=18.0, stall_s=0.75)  # written during step 4
    seconds = journal.seconds
    assert (seconds["productive"], seconds["checkpoint_stall"]) == (40.0, 0.75)
    assert seconds["between_steps"] == 0.25
    assert goodput_of(journal.events).checkpointing.save_s == 0.75


@pytest.mark.parametrize(("misses", "category"), [(0, "start"), (4, "compile")])
def test_the_excess_time_of_a_first_step_is_not_training(journal: Journal, misses: int, category: str) -> None:
    journal.start(10)
    journal.step(60, 1, step_s=45.0)
    journal.train(60, "compile_cache", hits=4 - misses, misses=misses, wall_s=45.0)
    journal.step(70, 2)
    journal.step(80, 3)
    seconds = journal.seconds
    assert seconds["productive"] == 30.0
    assert seconds[category] == (40.0 if category == "start" else 35.0)


def test_time_in_a_queue_has_its_own_category_and_costs_nothing(journal: Journal) -> None:
    journal.add(0, "stage_started", stage="preflight")
    journal.add(0, "job_queued", job="preflight", reason="Resources")
    journal.add(3600, "job_started", job="preflight", hosts=["n1"])
    journal.add(3610, "stage_finished", stage="preflight", wall_s=3610)
    journal.add(3610, "attempt_started", attempt=1, handle={})
    journal.add(3610, "job_queued", attempt=1, job="train", reason="Priority")
    journal.add(7210, "job_queued", attempt=1, job="train", reason="Resources")
    journal.add(10810, "job_started", attempt=1, job="train", hosts=["n1"])
    journal.train(10815, "train_started", resumed_from_step=0)
    journal.add(10815, "job_queued", attempt=1, job="eval-3", reason="Resources")
    journal.step(10830, 1)
    journal.end(10831, "cancelled", "stop")
    assert journal.seconds == {
        "productive": 10.0,
        "preflight": 10.0,
        "start": 10.0,
        "queued": 10800.0,
        "restart:cancelled": 1.0,
    }
    goodput = goodput_of(journal.events)
    assert goodput.cost_usd == pytest.approx(2 * 36.0 * 31 / 3600)
    assert goodput.process_hours == pytest.approx(8 * 31 / 3600)


def test_an_attempt_that_is_cancelled_in_the_queue_was_queued(journal: Journal) -> None:
    journal.add(0, "attempt_started", attempt=1, handle={})
    journal.add(0, "job_queued", attempt=1, job="train", reason="Priority")
    journal.add(50, "job_left_queue", attempt=1, job="train")
    journal.end(50, "cancelled", "stop")
    assert journal.seconds == {"queued": 50.0}
