"""Journals that tests make up event by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from conf.schema import BackendConfig, CheckpointConfig, ClusterConfig, Config
from hlatctl.report.goodput import Goodput, measure_goodput
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event

CONFIG = Config(
    cluster=ClusterConfig(nodes=2, processes_per_node=4, price_usd_per_node_hour=36.0),
    checkpoint=CheckpointConfig(every_steps=2),
    backend=BackendConfig(device="cuda"),
)


def goodput_of(events: Sequence[Event], config: Config = CONFIG) -> Goodput:
    return measure_goodput(events, config, fold(events))


class Journal:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, time_s: float, kind: str, *, writer: str = "flow", attempt: int = 0, **fields: Any) -> None:
        head = {"v": 1, "seq": len(self.events) + 1, "time_unix_s": 1e9 + time_s, "attempt": attempt, "kind": kind}
        self.events.append({**head, "writer": writer, **fields})

    def train(self, time_s: float, kind: str, attempt: int = 1, **fields: Any) -> None:
        self.add(time_s, kind, writer="train-rank00000", attempt=attempt, **fields)

    def step(self, time_s: float, step: int, attempt: int = 1, step_s: float = 10.0, data_wait_s: float = 0.0) -> None:
        self.train(time_s, "step", attempt, step=step, tokens=step, step_s=step_s, data_wait_s=data_wait_s)

    def start(self, time_s: float, attempt: int = 1, resumed_from_step: int = 0) -> None:
        self.add(time_s, "attempt_started", attempt=attempt, handle={})
        self.train(time_s + 5, "train_started", attempt, resumed_from_step=resumed_from_step)

    def end(self, time_s: float, cause: str, decision: str = "", attempt: int = 1) -> None:
        self.add(time_s, "attempt_ended", attempt=attempt, cause=cause, decision=decision)

    def saved(self, time_s: float, step: int, attempt: int = 1, **fields: float) -> None:
        self.train(time_s, "checkpoint_written", attempt, step=step, **fields)

    @property
    def seconds(self) -> dict[str, float]:
        return goodput_of(self.events).seconds


@pytest.fixture
def journal() -> Journal:
    made = Journal()
    made.add(0, "run_created", run_id="made-up")
    made.add(0, "head_started", pid=1)
    return made


def interrupted(journal: Journal, cause: str = "killed", decision: str = "restart") -> None:
    """Steps 1 to 4 in attempt 1, a checkpoint after 2; attempt 2 continues from there to step 5."""
    journal.start(10)
    for step in (1, 2):
        journal.step(10 + 10 * step, step, step_s=5.0)
    journal.saved(31, 2, wall_s=1.0)
    for step in (3, 4):
        journal.step(11 + 10 * step, step)
    journal.end(53, cause, decision)
    journal.start(60, attempt=2, resumed_from_step=2)
    for step in (3, 4, 5):
        journal.step(50 + 10 * step, step, attempt=2)
