"""A drill's outcomes as text: each fault, its detection and the recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths
from hlatctl.units import number

HEADER = ("fault", "detected as", "after", "recovered after", "redone steps", "losses", "outcome")
#: The fault whose recovery is compared with a cold start.
_KILLED = "kill_process"


@dataclass(frozen=True, kw_only=True)
class Drill:
    """The result of a drill.

    Args:
        outcomes: the newest ``drill_outcome`` event of each fault.
        steps: steps of the undisturbed run with which losses are compared.
        cold_start_s: from that run's driver start to its first step; None without such a run.
    """

    outcomes: list[Event]
    steps: int
    cold_start_s: float | None

    @property
    def failed(self) -> list[str]:
        """Return the titles of the faults from which the run did not recover."""
        return [str(event["title"]) for event in self.outcomes if event["failure"]]

    @property
    def killed_to_step_s(self) -> float | None:
        """Return the seconds from the kill -9 of a process to the next optimizer step."""
        times = [event.get("recovered_s") for event in self.outcomes if event["fault"] == _KILLED]
        return times[0] if times else None


def read(run: RunPaths) -> list[Event]:
    """Return the events of a run's drill."""
    return read_events(run, wanted=lambda line: b"drill_" in line)


def drill(events: Sequence[Event]) -> Drill | None:
    """Return the drill in a journal; None if the run was not drilled."""
    outcomes = {event["fault"]: event for event in events if event["kind"] == "drill_outcome"}
    baseline = next((event for event in reversed(events) if event["kind"] == "drill_baseline"), None)
    if not outcomes:
        return None
    return Drill(
        outcomes=list(outcomes.values()),
        steps=int(baseline["steps"]) if baseline else 0,
        cold_start_s=number(baseline, "cold_start_s") if baseline else None,
    )


def rows(drilled: Drill) -> list[list[str]]:
    """Return a row of cells for each fault, in the order of ``HEADER``."""
    return [_row(event) for event in drilled.outcomes]


def facts(drilled: Drill) -> list[tuple[str, str]]:
    """Return the drill's other results, as name and text."""
    compared = ("losses compared with", f"an undisturbed run of {drilled.steps:,} steps")
    killed_s, cold_s = drilled.killed_to_step_s, drilled.cold_start_s
    if killed_s is None or not cold_s:
        return [compared]
    return [
        compared,
        ("cold start", f"{cold_s:.1f} s from the driver's start to the first step, with compiled graphs cached"),
        ("kill -9 to the next step", f"{killed_s:.1f} s, {killed_s / cold_s:.2f} of a cold start"),
    ]


def _row(event: Event) -> list[str]:
    title = str(event["title"])
    if event["skipped"]:
        return [title, "–", "–", "–", "–", "–", f"skipped: {event['skipped']}"]
    if "detected_as" not in event:
        return [title, "–", "–", "–", "–", "–", f"NOT RECOVERED: {event['failure']}"]
    recovered_s = event["recovered_s"]
    return [
        title,
        str(event["detected_as"]),
        f"{event['detected_s']:.1f} s",
        "training continued" if recovered_s is None else f"{recovered_s:.1f} s",
        f"{event['lost_steps']:,}",
        _losses(event),
        f"NOT RECOVERED: {event['failure']}" if event["failure"] else "recovered",
    ]


def _losses(event: Event) -> str:
    if event["losses_equal"]:
        return "equal"
    return "DIFFER" if event["failure"] else f"within {event['largest']:.1g}"
