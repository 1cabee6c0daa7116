"""Claims on a run's wall time: what the trainer measured of its steps and its pauses for checkpoints. Pure.

A run has millions of steps: they are computed as columns, block by block. Times are Unix times in microseconds.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hlatctl.report.sequence import Array, Block, Item, Steps
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


class _Rows(NamedTuple):
    """Steps of attempts, without late ones: their rows, the index of each one's attempt, and times."""

    row: Array
    which: Array
    end_us: Array
    own_us: Array
    length_us: Array
    wait_us: Array
    stall_us: Array
    counts: Array


class Claims:
    """Times of steps and of the pauses after them. They never overlap.

    Args:
        steps: all of the journal.
        attempts: the attempts.
        stalls: pauses for checkpoints, by attempt and step.
        begin_us: the journal's first time.
        times_us: ascending times.

    Attributes:
        totals_us: claimed microseconds by category.
        before_us: claimed microseconds before each of ``times_us``.
    """

    def __init__(
        self,
        steps: Steps,
        attempts: Sequence[Bounds],
        stalls: dict[tuple[int, float], int],
        begin_us: int,
        times_us: Sequence[int],
    ) -> None:
        import numpy as np

        self.totals_us: dict[str, int] = defaultdict(int)
        self.before_us = np.zeros(len(times_us), dtype=np.int64)
        self._times_us, self._newest_us = np.asarray(times_us, dtype=np.int64), begin_us
        self._start_us = np.array([each.start_us for each in attempts], dtype=np.int64)
        self._last_us = np.array([each.last_us for each in attempts], dtype=np.int64)
        self._compiled = np.array([each.compiled for each in attempts], dtype=bool)
        if attempts:
            self._first_row, self._typical_us = _first_steps(_blocks(steps, attempts, {}), len(attempts))
            blocks = itertools.chain(_blocks(steps, attempts, stalls), [None])
            for rows, after in itertools.pairwise(blocks):
                if rows:
                    self._claim(rows, after)

    def _claim(self, rows: _Rows, after: _Rows | None) -> None:
        """Claim the times of a block; ``after`` is the next one."""
        import numpy as np

        which, end_us, length_us = rows.which, rows.end_us, rows.length_us
        ends_us = np.maximum(end_us, np.minimum(end_us + rows.stall_us, self._free_us(rows, after)))
        earliest_us = np.maximum(np.concatenate([[self._newest_us], ends_us[:-1]]), self._start_us[which])
        # An attempt's first step loads or compiles graphs; the time beyond the median of its others isn't training.
        typical_us = np.where(rows.row == self._first_row[which], self._typical_us[which], length_us)
        start_us = np.maximum(earliest_us, end_us - np.minimum(typical_us, length_us))
        is_compiled = (typical_us < length_us) & self._compiled[which]
        begins_us = np.where(is_compiled, np.maximum(earliest_us, end_us - length_us), start_us)
        waited_us = np.minimum(end_us, start_us + rows.wait_us)
        for category, times_us in (
            (COMPILE, start_us - begins_us),
            (LOST, (end_us - start_us)[~rows.counts]),
            (DATA_WAIT, (waited_us - start_us)[rows.counts]),
            (PRODUCTIVE, (end_us - waited_us)[rows.counts]),
            (CHECKPOINT_STALL, ends_us - end_us),
        ):
            if total_us := int(times_us.sum()):
                self.totals_us[category] += total_us
        self._count(begins_us, ends_us)
        self._newest_us = int(ends_us[-1])

    def _free_us(self, rows: _Rows, after: _Rows | None) -> Array:
        """Return when the pause after each step ends at the latest: before the next step.

        The pause follows the step, even if the checkpoint was written later.
        """
        import numpy as np

        free_us = self._last_us[rows.which]
        which, end_us, length_us = rows.which[1:], rows.end_us[1:], rows.length_us[1:]
        if after is not None:
            which = np.append(which, after.which[0])
            end_us = np.append(end_us, after.end_us[0])
            length_us = np.append(length_us, after.length_us[0])
        known = len(which)
        next_us = end_us - np.where(which == rows.which[:known], length_us, 0)
        free_us[:known] = np.minimum(free_us[:known], next_us)
        return free_us

    def _count(self, begins_us: Array, ends_us: Array) -> None:
        """Add claims that follow those before to ``before_us``."""
        import numpy as np

        sums_us = np.concatenate([[0], np.cumsum(ends_us - begins_us)])
        first, stop = np.searchsorted(self._times_us, [begins_us[0], ends_us[-1]])
        times_us = self._times_us[first:stop]
        index = np.searchsorted(begins_us, times_us, "right")
        self.before_us[first:stop] += sums_us[index] - np.maximum(0, ends_us[index - 1] - times_us)
        self.before_us[stop:] += sums_us[-1]


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


def _blocks(steps: Steps, attempts: Sequence[Bounds], stalls: dict[tuple[int, float], int]) -> Iterator[_Rows]:
    """Yield the attempts' steps, without late ones. No block is empty."""
    import numpy as np

    order = np.argsort(np.array([each.attempt for each in attempts], dtype=np.int64))
    numbers = np.array([attempts[index].attempt for index in order], dtype=np.int64)
    first = np.array([each.first for each in attempts], dtype=np.int64)
    stop = np.array([each.stop for each in attempts], dtype=np.int64)
    saved = np.array([step for _, step in stalls if math.isfinite(step)], dtype=np.float64)
    for block in steps.blocks():
        found = np.minimum(np.searchsorted(numbers, block.attempt), len(numbers) - 1)
        which, row = order[found], block.first + np.arange(len(found))
        inside = (numbers[found] == block.attempt) & (row >= first[which]) & (row < stop[which])
        if inside.any():
            stall_us = _stalls_us(block, saved, stalls)
            columns = (row, which, block.time_us, block.own_us, block.length_us, block.wait_us, stall_us, block.counts)
            yield _Rows(*(column[inside] for column in columns))


def _first_steps(blocks: Iterable[_Rows], attempts: int) -> tuple[Array, Array]:
    """Return the row of each attempt's first step, and the median time of its other steps; -1 if it has no others."""
    import numpy as np

    first_row = np.full(attempts, -1, dtype=np.int64)
    typical_us, own_us = np.zeros(attempts, dtype=np.int64), defaultdict(list)
    for rows in blocks:
        for which in np.unique(rows.which).tolist():
            mine = rows.which == which
            if which not in own_us:
                first_row[which] = rows.row[mine][0]
            own_us[which].append(rows.own_us[mine])
    for which, parts in own_us.items():
        others_us = np.concatenate(parts)[1:]
        parts.clear()
        if len(others_us):
            typical_us[which] = round(float(np.median(others_us, overwrite_input=True)))
        else:
            first_row[which] = -1
    return first_row, typical_us


def _stalls_us(block: Block, saved: Array, stalls: dict[tuple[int, float], int]) -> Array:
    import numpy as np

    paused_us = np.zeros(len(block.step), dtype=np.int64)
    for index in np.flatnonzero(np.isin(block.step, saved)).tolist():
        paused_us[index] = stalls.get((int(block.attempt[index]), float(block.step[index])), 0)
    return paused_us
