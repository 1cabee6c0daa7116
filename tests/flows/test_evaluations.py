"""The queue of evaluations on the simulated cluster: order, simultaneous ones, the alarm, and pauses of training."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conf.schema import Config, SimulationConfig
from flows import pretrain
from hlatctl.run.journal import Event, read_events
from tests.flows.conftest import Recorder

pytestmark = pytest.mark.processes

HOUR_S = 3600.0
STORY = ("attempt_started", "attempt_ended", "eval_started", "eval_finished")


def slow(config: Config, **keys: Any) -> Config:
    """Return a configuration with six milestones, 51 steps of 10 s apart."""
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, every_tokens=417_792, **keys))


def drive(config: Config, recorder: Recorder | None = None, evaluation_s: float = 100 * HOUR_S) -> list[Event]:
    cluster = SimulationConfig(step_s=10.0, evaluation_s=evaluation_s, shows_recovery=False)
    run = pretrain.create(config, argv=[], simulated=cluster)
    assert pretrain.drive(run, recorder).status == "finished"
    return list(read_events(run))


def milestones(events: list[Event], kind: str) -> list[int]:
    return [event["milestone_tokens"] for event in events if event["kind"] == kind]


def test_the_oldest_milestone_is_next_and_one_alarm_says_that_evaluation_falls_behind(
    simulated_config: Config, recorder: Recorder
) -> None:
    events = drive(slow(simulated_config), recorder, evaluation_s=1000.0)
    announced = milestones(events, "milestone")
    assert len(announced) == 6
    assert milestones(events, "eval_taken") == milestones(events, "eval_started") == announced
    (alarm,) = (event for event in events if event["kind"] == "alarm")
    assert alarm["what"] == "evaluation_behind"
    assert alarm["message"].startswith("2 milestones wait for evaluation: one takes 16 min 40 s, 2")
    assert "times the 8 min 30 s between two milestones, so evaluation falls behind" in alarm["message"]
    assert alarm["message"].endswith(" eval.concurrent=2` evaluates more at once")
    assert alarm["message"] in recorder.messages


def test_two_evaluators_take_the_newest_milestones_first(simulated_config: Config) -> None:
    events, now, at_once = drive(slow(simulated_config, concurrent=2, order="newest")), 0, []
    for event in events:
        now += (event["kind"] == "eval_started") - (event["kind"] == "eval_finished")
        at_once.append(now)
    assert max(at_once) == 2
    first, second, *others = milestones(events, "milestone")
    assert milestones(events, "eval_started") == [first, second, *reversed(others)]


def test_training_ends_its_attempt_at_each_milestone_and_waits_for_the_evaluation(
    simulated_config: Config, recorder: Recorder
) -> None:
    events = drive(slow(simulated_config, placement="between"), recorder, evaluation_s=HOUR_S)
    story = [event["kind"] for event in events if event["kind"] in STORY]
    assert story == [*STORY] * 6
    ended = [event for event in events if event["kind"] == "attempt_ended"]
    assert [event["cause"] for event in ended] == ["evaluation"] * 5 + ["finished"]
    assert [event["step"] for event in ended] == [51, 102, 153, 204, 255, 306]
    assert "alarm" not in {event["kind"] for event in events}, "nothing waits for long"
    assert "attempt 1: ended at step 51 (ended to evaluate its milestone; checkpoint written); " in "".join(
        recorder.messages
    )
