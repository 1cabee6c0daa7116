"""Durations that the trainer measured, as microseconds of its events. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from hlatctl.run.journal import Event, number


def stalls_us(events: Sequence[Event]) -> dict[tuple[int, float], int]:
    """Return how long training paused for a checkpoint, by attempt and step."""
    stalls: dict[tuple[int, float], int] = defaultdict(int)
    for event in events:
        if event["kind"] == "checkpoint_written":
            stalls[event["attempt"], number(event, "step")] += us(event, stall_field(event))
    return stalls


def stall_field(event: Event) -> str:
    """Return the field of a ``checkpoint_written`` event that says how long training paused."""
    return "stall_s" if "stall_s" in event else "wall_s"


def typical_us(events: Sequence[Event], steps: Sequence[int]) -> dict[int, int]:
    """Return the median time of each attempt's steps after its first."""
    lengths_us: dict[int, list[int]] = defaultdict(list)
    for index in steps:
        lengths_us[events[index]["attempt"]].append(us(events[index], "step_s"))
    return {attempt: round(statistics.median(rest)) for attempt, (_, *rest) in lengths_us.items() if rest}


def length_us(event: Event) -> int:
    """Return the time of the steps of a ``step`` event."""
    return made(event) * us(event, "step_s")


def made(event: Event) -> int:
    """Return the number of steps of a ``step`` event; a dry run's may cover many."""
    made = event.get("steps", 1)
    return made if isinstance(made, int) and made > 0 else 1


def us(event: Event, name: str) -> int:
    """Return a duration of an event in microseconds; 0 if it is missing, damaged or negative."""
    value_s = number(event, name)
    return round(value_s * 1e6) if math.isfinite(value_s) and value_s > 0 else 0
