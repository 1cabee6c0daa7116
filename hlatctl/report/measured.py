"""Claims on a run's wall time: what the trainer measured of its steps and its pauses for checkpoints. Pure.

All steps of a run are computed at once, as columns, because there are millions. Times are Unix times in microseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hlatctl.report.sequence import Array, Item, Steps
from hlatctl.run.journal import Event, number

PRODUCTIVE, DATA_WAIT, CHECKPOINT_STALL = "productive", "data_wait", "checkpoint_stall"
LOST, COMPILE = "lost", "compile"


@dataclass(frozen=True)
class Bounds:
    """Where an attempt's steps are.

    Args:
        attempt: its number.
        first, stop: rows from its start to its trainer's last event.
        start_us, last_us: the times of both.
        compiled: its trainer compiled graphs.
    """

    attempt: int
    first: int
    stop: int
    start_us: int
    last_us: int
    compiled: bool


class Claims:
    """Times of steps and of the pauses after them. They never overlap.

    Args:
        steps: all of the journal.
        attempts: the attempts.
        stalls: pauses for checkpoints, by attempt and step.
        begin_us: the journal's first time.
    """

    def __init__(
        self, steps: Steps, attempts: Sequence[Bounds], stalls: dict[tuple[int, float], int], begin_us: int
    ) -> None:
        import numpy as np

        rows, which = _rows(steps, attempts)
        end_us, length_us = steps.time_us[rows], steps.length_us[rows]
        own_us, is_split = _own_us(steps.own_us[rows], length_us, which)
        ends_us = end_us + _stalls_us(steps, rows, stalls)
        free_us = np.array([each.last_us for each in attempts], dtype=np.int64)[which]
        # The pause follows the step, even if the checkpoint was written later, and ends before the next step.
        next_us = end_us[1:] - np.where(which[1:] == which[:-1], length_us[1:], 0)
        free_us[:-1] = np.minimum(free_us[:-1], next_us)
        ends_us = np.maximum(end_us, np.minimum(ends_us, free_us))
        earliest_us = np.maximum(
            np.concatenate([[begin_us], ends_us[:-1]]) if len(rows) else end_us,
            np.array([each.start_us for each in attempts], dtype=np.int64)[which],
        )
        start_us = np.maximum(earliest_us, end_us - own_us)
        is_compiled = is_split & np.array([each.compiled for each in attempts], dtype=bool)[which]
        begins_us = np.where(is_compiled, np.maximum(earliest_us, end_us - length_us), start_us)
        waited_us = np.minimum(end_us, start_us + steps.wait_us[rows])
        counts = steps.counts[rows]
        self.totals_us: dict[str, int] = {COMPILE: int((start_us - begins_us).sum())} if is_compiled.any() else {}
        self.totals_us |= {
            LOST: int((end_us - start_us)[~counts].sum()),
            DATA_WAIT: int((waited_us - start_us)[counts].sum()),
            PRODUCTIVE: int((end_us - waited_us)[counts].sum()),
            CHECKPOINT_STALL: int((ends_us - end_us).sum()),
        }
        self._begins_us, self._ends_us = begins_us, ends_us
        self._before_us = np.concatenate([[0], np.cumsum(ends_us - begins_us)])

    def before(self, times_us: Sequence[int]) -> list[int]:
        """Return the claimed microseconds before each of some times."""
        import numpy as np

        times = np.array(times_us, dtype=np.int64)
        index = np.searchsorted(self._begins_us, times, "right")
        if not len(self._begins_us):
            return [0] * len(times)
        over_us = np.where(index > 0, np.maximum(0, self._ends_us[index - 1] - times), 0)
        claimed: list[int] = (self._before_us[index] - over_us).tolist()
        return claimed


def stalls_us(items: Iterable[Item]) -> dict[tuple[int, float], int]:
    """Return how long training paused for a checkpoint, by attempt and step."""
    stalls: dict[tuple[int, float], int] = defaultdict(int)
    for item in items:
        if item.kind == "checkpoint_written":
            paused_s = stall_s(item.event)
            if math.isfinite(paused_s) and paused_s > 0:
                stalls[item.attempt, number(item.event, "step")] += round(paused_s * 1e6)
    return stalls


def stall_s(event: Event) -> float:
    """Return how long training paused for a ``checkpoint_written`` event; NaN if it is missing or damaged."""
    return number(event, "stall_s" if "stall_s" in event else "wall_s")


def _rows(steps: Steps, attempts: Sequence[Bounds]) -> tuple[Array, Array]:
    """Return the rows of attempts' steps, without late events, and the index of each one's attempt."""
    import numpy as np

    order = np.argsort(np.array([each.attempt for each in attempts], dtype=np.int64))
    numbers = np.array([attempts[index].attempt for index in order], dtype=np.int64)
    if not len(numbers):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    found = np.minimum(np.searchsorted(numbers, steps.attempt), len(numbers) - 1)
    which, rows = order[found], np.arange(len(found))
    inside = numbers[found] == steps.attempt
    inside &= rows >= np.array([each.first for each in attempts], dtype=np.int64)[which]
    inside &= rows < np.array([each.stop for each in attempts], dtype=np.int64)[which]
    return rows[inside], which[inside]


def _own_us(own_us: Array, length_us: Array, which: Array) -> tuple[Array, Array]:
    """Return the training time of each step, and whether it is less than its measured one.

    An attempt's first step loads or compiles graphs; the time beyond the median of its other steps isn't training.
    """
    import numpy as np

    training_us, is_split = length_us.copy(), np.zeros(len(which), dtype=bool)
    order = np.argsort(which, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        if len(rows) > 1:
            typical_us = round(float(np.median(own_us[rows[1:]])))
            is_split[rows[0]] = typical_us < length_us[rows[0]]
            training_us[rows[0]] = min(typical_us, int(length_us[rows[0]]))
    return training_us, is_split


def _stalls_us(steps: Steps, rows: Array, stalls: dict[tuple[int, float], int]) -> Array:
    import numpy as np

    paused_us = np.zeros(len(rows), dtype=np.int64)
    saved = np.array([step for _, step in stalls if math.isfinite(step)], dtype=np.float64)
    for index in np.flatnonzero(np.isin(steps.step[rows], saved)).tolist():
        row = rows[index]
        paused_us[index] = stalls.get((int(steps.attempt[row]), float(steps.step[row])), 0)
    return paused_us
