"""The phases of a recovery, from the last event before an attempt's end to the first step of a later one. Pure.

Clocks of hosts differ. The driver's clock gives all that the driver does, and rank 0's gives durations of what it does
itself. The two meet in rank 0's events: the driver reads each of them some time after it was written. The least of
these delays is taken for none, so the difference of the clocks is known to about one poll of the driver's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hlatctl.run.events import RECOVERY_PHASES
from hlatctl.run.state import AttemptState


class RankClock:
    """Carries times of rank 0's clock over to the driver's.

    Args:
        known_unix_s: time of the newest event that was read before, perhaps long after it was written; 0: none.
    """

    def __init__(self, known_unix_s: float = 0.0) -> None:
        self._ahead_s, self._newest_unix_s = math.inf, known_unix_s

    def read(self, newest_unix_s: float, now_unix_s: float) -> None:
        """Learn from the newest event's time by rank 0's clock, just read at ``now_unix_s`` by the driver's."""
        if newest_unix_s != self._newest_unix_s:
            self._newest_unix_s = newest_unix_s
            self._ahead_s = min(self._ahead_s, now_unix_s - newest_unix_s)

    def here(self, unix_s: float) -> float | None:
        """Return a time of rank 0's clock by the driver's; None: no event was read."""
        return unix_s + self._ahead_s if math.isfinite(self._ahead_s) else None


def recovery(attempts: Sequence[AttemptState], clock: RankClock) -> tuple[str, dict[str, float]] | None:
    """Return the cause of the newest attempt's recovery and its seconds by phase; None: it was none or has no step yet.

    A stop by a person, or of the policy, isn't followed by a recovery.
    """
    newest, before = attempts[-1], _since_last_step(attempts[:-1])
    if newest.first_step_unix_s is None or newest.began_unix_s is None or newest.recovery or not before:
        return None
    began_unix_s = clock.here(newest.began_unix_s)
    ends = [attempt.ended_unix_s for attempt in before]
    if began_unix_s is None or None in ends or any(attempt.decision in ("stop", "done") for attempt in before):
        return None
    first_end_s, last_end_s = float(ends[0] or 0.0), float(ends[-1] or 0.0)
    groups_s, load_s = (float(newest.starting.get(name) or 0.0) for name in ("groups_s", "load_s"))
    seconds = (
        before[0].detect_s or 0.0,
        before[0].decide_s or 0.0,
        last_end_s - first_end_s,
        newest.started_unix_s - last_end_s,
        began_unix_s - newest.started_unix_s - groups_s - load_s,
        groups_s,
        load_s,
        newest.first_step_unix_s - newest.began_unix_s,
    )
    return before[0].cause, {name: max(0.0, value) for name, value in zip(RECOVERY_PHASES, seconds, strict=True)}


def _since_last_step(attempts: Sequence[AttemptState]) -> Sequence[AttemptState]:
    """Return the newest attempts from the one that made a step; empty if none did."""
    for number in range(len(attempts) - 1, -1, -1):
        if attempts[number].last_step:
            return attempts[number:]
    return ()
