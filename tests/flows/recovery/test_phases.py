"""The phases of a recovery add up to its time, whatever the clock of rank 0's host shows."""

from __future__ import annotations

import pytest

from flows.recovery.phases import RankClock, recovery
from hlatctl.run.events import RECOVERY_PHASES, recovery_text
from hlatctl.run.state import AttemptState


def attempt(number: int, started: float, ended: float | None, step: int = 0, **fields: object) -> AttemptState:
    made = AttemptState(number, {}, started, ended_unix_s=ended, last_step=step)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("ahead_s", [0.0, -3600.0, 86400.0])
def test_the_phases_add_up_between_hosts_with_different_clocks(ahead_s: float) -> None:
    died = attempt(1, 0.0, 103.0, step=5, decision="restart", cause="killed", detect_s=2.0, decide_s=1.0)
    failed = attempt(2, 104.0, 110.0, decision="restart", cause="port_in_use")
    began, first = 120.0 + ahead_s, 122.0 + ahead_s
    newest = attempt(3, 112.0, None, step=6, starting={"groups_s": 1.0, "load_s": 3.0}, began_unix_s=began)
    clock = RankClock()
    clock.read(began, 120.5)  # read half a second after it was written
    assert recovery([died, failed, newest], clock) is None, "it has made no step"
    newest.first_step_unix_s = first
    clock.read(first, 122.0)  # read at once
    cause, found = recovery([died, failed, newest], clock) or ("", {})
    assert cause == "killed"
    assert found == dict(zip(RECOVERY_PHASES, (2.0, 1.0, 7.0, 2.0, 4.0, 1.0, 3.0, 2.0), strict=True))
    assert sum(found.values()) == 122.0 - 100.0
    assert recovery_text(found).startswith("22 s from the last event to the first step: detect 2.0 s, decide 1.0 s")


def test_what_a_person_resumes_and_a_first_attempt_are_no_recoveries() -> None:
    clock, begun = RankClock(), {"began_unix_s": 10.0, "first_step_unix_s": 11.0}
    clock.read(11.0, 11.0)
    stopped = attempt(1, 0.0, 5.0, step=3, decision="stop")
    assert recovery([attempt(1, 0.0, None, step=1, **begun)], clock) is None
    assert recovery([stopped, attempt(2, 6.0, None, step=4, **begun)], clock) is None


def test_an_event_from_before_this_driver_says_nothing_about_the_clock() -> None:
    clock = RankClock(100.0)
    clock.read(100.0, 4000.0)
    assert clock.here(100.0) is None
    clock.read(4001.0, 4001.5)
    assert clock.here(4001.0) == 4001.5
