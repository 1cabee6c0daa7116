"""Ranks as threads of one process, for code that only exchanges JSON during training; not a test by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.waiting import WAIT_S


class RankThread:
    """The part of a backend that checkpoints use to communicate."""

    def __init__(self, rank: int, world_size: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, world_size
        self._values, self._barrier = values, barrier
        self.exchanges = 0

    def gather_beside(self, value: Any) -> list[Any]:
        self.exchanges += 1
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait(timeout=WAIT_S)
        values = [json.loads(text) for text in self._values]
        self._barrier.wait(timeout=WAIT_S)
        return values

    def to_rank0_beside(self, value: Any) -> list[Any]:
        values = self.gather_beside(value)
        return values if self.rank == 0 else []

    def from_rank0_beside(self, value: Any) -> Any:
        return self.gather_beside(value)[0]


def on_ranks(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Call ``work`` with each rank's backend at the same time; return each result, or the exception that it raised."""
    barrier, values = threading.Barrier(world_size), [None] * world_size

    def call(rank: int) -> Any:
        try:
            return work(RankThread(rank, world_size, values, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, range(world_size)))
