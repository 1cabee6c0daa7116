"""The state of a sweep: damaged events hide no others."""

from __future__ import annotations

from typing import Any

from hlatctl.run.journal import Event
from hlatctl.run.sweep import fold


def event(seq: int, kind: str, **fields: Any) -> Event:
    return {"v": 1, "seq": seq, "time_unix_s": float(seq), "attempt": 0, "kind": kind, **fields}


def asked(seq: int, trial: int) -> Event:
    return event(seq, "trial_asked", trial=trial, run_id=f"s-t{trial}", arm=trial, point={}, overrides=[], seed=None)


def test_events_after_a_lost_line_give_warnings_and_other_trials_are_unaffected() -> None:
    story = [
        asked(1, 0),
        event(3, "trial_started", trial=1),
        asked(4, 2),
        event(5, "trial_started", trial=2),
        event(6, "trial_rung", trial="two", tokens=10, value=1.0),
        event(7, "from_a_later_version"),
    ]
    state = fold(story)
    assert {number: trial.status for number, trial in state.trials.items()} == {0: "asked", 2: "running"}
    assert state.warnings == ["event 3 (trial_started): damaged, ignored", "event 6 (trial_rung): damaged, ignored"]
