"""The interface of a mirror, which shows a run's steps, scores, labels and outcome at one service.

``flows.tracking.mirrors.copier`` calls a mirror in the order of the journal and gives it nothing twice. A mirror only
needs to know where to continue. A step counts if no later attempt starts before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flows.tracking.mirrors.points import Point, Scores
from hlatctl.run.journal import Event, JournalTail
from hlatctl.run.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class About:
    """What doesn't change in a run.

    Args:
        run_id: the run's id, also at the service.
        root: the run directory.
        simulated: nothing was trained.
        sweep: the sweep of which it is a trial, or empty.
        created_unix_s: time of its creation.
        config: values of its first configuration by dotted key, without secrets.
    """

    run_id: str
    root: Path
    simulated: bool
    sweep: str
    created_unix_s: float
    config: Mapping[str, bool | int | float | str]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What people have written about a run, and how its configuration has changed.

    Args:
        name: the run's name, or its id; marked if it is simulated.
        tags: values by key.
        notes: one paragraph each, with time and author.
        amended: the values of each amended key in order, as text.
        facts: commit, user and similar by name, as soon as they are recorded.
    """

    name: str
    tags: Mapping[str, str]
    notes: Sequence[str]
    amended: Mapping[str, str]
    facts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a run.

    Args:
        status: ``running``, ``finished``, ``failed`` or ``stopped``.
        message: reason; may be empty.
        step: its newest step.
    """

    status: str
    message: str
    step: int
    time_unix_s: float


class Mirror(Protocol):
    """One run at one service.

    Every method raises ``OSError`` or an exception of the service's library if the service does not accept the data.
    The mirror is then closed. Another one is opened later and gets what the service lacks.
    """

    @property
    def last_step(self) -> int:
        """The newest step that the service has; 0: none."""

    def steps(self, points: Sequence[Point]) -> None:
        """Add steps, in order, each later than the last one."""

    def rewind(self, step: int, tokens: int) -> bool:
        """Remove the steps after this one, which are trained again. ``last_step`` returns what is left.

        Args:
            step: the last step that counts.
            tokens: tokens consumed up to this step.

        Returns:
            Whether scores that were added after it are removed too.
        """

    def scores(self, scores: Scores) -> None:
        """Add the scores of a milestone, which may be one of an earlier step."""

    def labels(self, labels: Labels) -> None:
        """Replace the labels."""

    def outcome(self, outcome: Outcome) -> None:
        """Replace the outcome."""

    def flush(self) -> dict[str, int]:
        """Hand over everything added so far; return what this mirror needs to continue from here."""

    def close(self) -> None:
        """Finish the hand-over and release everything."""


class Attempts:
    """The starts of a run's attempts.

    Args:
        events: ``train_started`` events, in order.
    """

    def __init__(self, events: list[Event]) -> None:
        self._resumed: dict[int, int] = {}
        self._last: dict[int, float] = {}
        for event in events:
            self.add(event)

    @classmethod
    def of(cls, run: RunPaths) -> Attempts:
        """Read them from a journal without parsing its steps (0.3 s for a million of them)."""
        tail = JournalTail(run, wanted=lambda line: b'"train_started"' in line)
        return cls([event for event in tail.stream() if event["kind"] == "train_started"])

    @property
    def newest(self) -> int:
        """The newest attempt; 0: none has started."""
        return max(self._resumed, default=0)

    def add(self, started: Event) -> None:
        """Add a ``train_started`` event; adding it again changes nothing."""
        self._resumed[int(started["attempt"])] = int(started.get("resumed_from_step") or 0)
        self._last.clear()

    def counts(self, step: Event) -> bool:
        """Return whether no later attempt starts before this step."""
        attempt = int(step["attempt"])
        if attempt not in self._last:
            later = (resumed for number, resumed in self._resumed.items() if number > attempt)
            self._last[attempt] = min(later, default=math.inf)
        return bool(step["step"] <= self._last[attempt])
