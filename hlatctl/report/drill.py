"""A fire drill's outcome as text: what was broken, how it was noticed, how the run got over it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlatctl.run.journal import Event, number

HEADER = ("fault", "detected as", "after", "recovered after", "steps done again", "losses", "outcome")
#: The fault whose recovery is compared with a cold start.
_KILLED = "kill_process"


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What a drilled run's journal says.

    Args:
        outcomes: the newest ``drill_outcome`` event of each fault.
        steps: of the undisturbed run that the losses are compared with.
        cold_start_s: from its head's start to its first step; None if there was none.
    """

    outcomes: list[Event]
    steps: int
    cold_start_s: float | None

    @property
    def failed(self) -> list[str]:
        """Titles of the faults that the run did not recover from."""
        return [str(event["title"]) for event in self.outcomes if event["failure"]]

    @property
    def killed_to_step_s(self) -> float | None:
        """From the kill -9 of a process to the next optimizer step."""
        times = [event.get("recovered_s") for event in self.outcomes if event["fault"] == _KILLED]
        return times[0] if times else None


def drill(events: Sequence[Event]) -> Drill | None:
    """The drill that a journal tells of; None if the run was not drilled."""
    outcomes = {event["fault"]: event for event in events if event["kind"] == "drill_outcome"}
    baseline = next((event for event in reversed(events) if event["kind"] == "drill_baseline"), None)
    if not outcomes:
        return None
    return Drill(
        outcomes=list(outcomes.values()),
        steps=int(baseline["steps"]) if baseline else 0,
        cold_start_s=number(baseline, "cold_start_s") if baseline else None,
    )


def rows(found: Drill) -> list[list[str]]:
    """The cells under ``HEADER``, a row for each fault."""
    return [_row(event) for event in found.outcomes]


def facts(found: Drill) -> list[tuple[str, str]]:
    """What else the drill showed, name and text."""
    compared = ("losses compared with", f"an undisturbed run of {found.steps:,} steps")
    killed_s, cold_s = found.killed_to_step_s, found.cold_start_s
    if killed_s is None or not cold_s:
        return [compared]
    return [
        compared,
        ("cold start", f"{cold_s:.1f} s from the head's start to the first step, compiled graphs at hand"),
        ("kill -9 to the next step", f"{killed_s:.1f} s, {killed_s / cold_s:.2f} of a cold start"),
    ]


def _row(event: Event) -> list[str]:
    title = str(event["title"])
    if event["skipped"]:
        return [title, "–", "–", "–", "–", "–", f"not tried: {event['skipped']}"]
    if "detected_as" not in event:
        return [title, "–", "–", "–", "–", "–", f"NOT RECOVERED: {event['failure']}"]
    recovered_s = event["recovered_s"]
    return [
        title,
        str(event["detected_as"]),
        f"{event['detected_s']:.1f} s",
        "training went on" if recovered_s is None else f"{recovered_s:.1f} s",
        f"{event['lost_steps']:,}",
        "the same" if event["losses_equal"] else "DIFFER",
        f"NOT RECOVERED: {event['failure']}" if event["failure"] else "recovered",
    ]
