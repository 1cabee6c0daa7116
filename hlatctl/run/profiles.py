"""What `hlatctl profile` asks of running training, and the names of the files with the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hlatctl.run.plain import from_plain

#: A trace has every operator of every step.
MOST_STEPS = 20
#: Ranks of a profile. All ranks of a run write into one folder at once, and people look at a few.
MOST_RANKS = 16


@dataclass(frozen=True)
class ProfileOrder:
    """One profile that was asked for.

    Args:
        number: from 1 in a run.
        steps: that are recorded.
        ranks: that record.
        memory: also record each allocation.
    """

    number: int
    steps: int
    ranks: list[int]
    memory: bool

    @classmethod
    def of(cls, value: Any) -> ProfileOrder:
        """Return the order of a JSON value.

        Raises:
            TypeError: a field is missing, unknown or of another type.
            ValueError: a number is out of range.
        """
        order = from_plain(cls, value)
        if not (order.number > 0 and 0 < order.steps <= MOST_STEPS and 0 < len(order.ranks) <= MOST_RANKS):
            raise ValueError(f"a profile of {order.steps} steps of {len(order.ranks)} ranks")
        return order


def trace_name(rank: int) -> str:
    """Return the name of a rank's trace, for a viewer of Chrome traces."""
    return f"rank-{rank:05d}.trace.json.gz"


def table_name(rank: int) -> str:
    """Return the name of a rank's table of operators, as text."""
    return f"rank-{rank:05d}.operators.txt"
