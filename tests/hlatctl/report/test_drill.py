"""A drill's table and facts, from its events."""

from __future__ import annotations

from typing import Any

from hlatctl.report.drill import HEADER, drill, facts, rows
from hlatctl.run.journal import Event


def outcome(fault: str, title: str, **fields: Any) -> Event:
    return {"kind": "drill_outcome", "fault": fault, "title": title, "failure": "", "skipped": "", **fields}


KILLED = outcome(
    "kill_process",
    "kill -9 of a process",
    detected_as="killed",
    detected_s=1.25,
    recovered_s=6.0,
    lost_steps=7,
    losses_equal=True,
)
SLOWED = outcome(
    "slow_process",
    "a process slowed down",
    detected_as="straggler (rank 1)",
    detected_s=3.0,
    recovered_s=None,
    lost_steps=0,
    losses_equal=True,
)
BASELINE = {"kind": "drill_baseline", "steps": 900, "cold_start_s": 12.0}


def test_a_run_that_was_not_drilled_has_no_drill() -> None:
    assert drill([{"kind": "step"}, BASELINE]) is None


def test_every_fault_has_a_row() -> None:
    drilled = drill([BASELINE, KILLED, SLOWED])
    assert drilled is not None
    assert rows(drilled) == [
        ["kill -9 of a process", "killed", "1.2 s", "6.0 s", "7", "equal", "recovered"],
        ["a process slowed down", "straggler (rank 1)", "3.0 s", "training continued", "0", "equal", "recovered"],
    ]
    assert all(len(row) == len(HEADER) for row in rows(drilled))
    assert drilled.failed == []


def test_the_time_to_the_next_step_is_compared_with_a_cold_start() -> None:
    drilled = drill([BASELINE, KILLED])
    assert drilled is not None
    assert facts(drilled) == [
        ("losses compared with", "an undisturbed run of 900 steps"),
        ("cold start", "12.0 s from the driver's start to the first step, with compiled graphs cached"),
        ("kill -9 to the next step", "6.0 s, 0.50 of a cold start"),
    ]
    without = drill([BASELINE, SLOWED])
    assert without is not None
    assert facts(without) == [("losses compared with", "an undisturbed run of 900 steps")]


def test_failed_recoveries_are_named_and_skipped_faults_are_not_failures() -> None:
    drilled = drill(
        [
            BASELINE,
            outcome("kill_head", "kill -9 of the driver", failure="no new driver within 60 s", losses_equal=True),
            outcome("fill_disk", "the disk full", skipped="needs bubblewrap"),
            {**KILLED, "losses_equal": False, "failure": "its losses are not those of the undisturbed run"},
        ]
    )
    assert drilled is not None
    assert drilled.failed == ["kill -9 of the driver", "kill -9 of a process"]
    assert [row[-2:] for row in rows(drilled)] == [
        ["–", "NOT RECOVERED: no new driver within 60 s"],
        ["–", "skipped: needs bubblewrap"],
        ["DIFFER", "NOT RECOVERED: its losses are not those of the undisturbed run"],
    ]


def test_losses_of_a_device_that_rounds_differently_each_time_say_by_how_much_they_differ() -> None:
    drilled = drill([BASELINE, {**KILLED, "losses_equal": False, "largest": 3.1e-4}])
    assert drilled is not None
    assert rows(drilled)[0][-2:] == ["within 0.0003", "recovered"]


def test_the_newest_outcome_of_a_fault_counts() -> None:
    drilled = drill([outcome("kill_process", "kill -9 of a process", failure="gone"), BASELINE, KILLED])
    assert drilled is not None
    assert (len(drilled.outcomes), drilled.failed) == (1, [])
