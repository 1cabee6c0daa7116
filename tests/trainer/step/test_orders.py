"""What the driver asks of a running attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere
from trainer.backends.base import ENDS, NEWS, STOP, StepMetrics
from trainer.step import loop
from trainer.step.loop import Orders


def give(run: RunPaths, **order: Any) -> None:
    files.write_json(run.orders(1), {"numbers": [], "values": {}, "end_after_step": None, "profile": None, **order})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr("trainer.step.loop.time.monotonic", lambda: now_s[0])
    return now_s


def test_new_orders_are_announced_until_they_are_taken(tmp_path: Path, clock: list[float]) -> None:
    run = RunPaths(tmp_path)
    mine = Orders(run, 1)
    assert mine.signal(1) == 0
    give(run, numbers=[2], values={"checkpoint.keep": 5})
    assert mine.signal(2) == 0, "the file is not read at every step"
    clock[0] += loop._LOOK_EVERY_S
    assert mine.signal(3) == mine.signal(4) == NEWS
    assert mine.take() == ([2], {"checkpoint.keep": 5}, None)
    assert mine.signal(5) == 0
    assert mine.take() == ([], {"checkpoint.keep": 5}, None)


def test_training_ends_after_a_step_only_while_a_driver_wants_it(tmp_path: Path, clock: list[float]) -> None:
    run = RunPaths(tmp_path)
    give(run, end_after_step=10)
    eager, lazy = Orders(run, 1), Orders(run, 1, ahead=1)
    assert [eager.signal(step) for step in (9, 10)] == [0, ENDS]
    assert [lazy.signal(step) for step in (8, 9)] == [0, ENDS]
    clock[0] += loop._FRESH_S
    assert eager.signal(11) == 0, "nobody would start the next attempt"
    give(run, end_after_step=10)
    clock[0] += loop._LOOK_EVERY_S
    assert eager.signal(12) == ENDS


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    files.write_text(run.orders(1), '{"numbers": [1]}')
    assert Orders(run, 1).signal(1) == 0


def test_a_signal_keeps_its_parts_in_the_sum_of_many_processes() -> None:
    metrics = StepMetrics.of([0.0, 2047 * STOP + NEWS, 0.0, 0.0])
    assert (metrics.stops, metrics.has_news, metrics.ends) == (True, True, False)
    metrics = StepMetrics.of([0.0, float(ENDS), 0.0, 0.0])
    assert (metrics.stops, metrics.has_news, metrics.ends) == (False, False, True)


def test_running_training_takes_another_interval_of_checkpoints(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 24, "keep": 9})
    give(run, numbers=[3, 4], values={"checkpoint.every_steps": 6, "checkpoint.keep": 2})
    assert train_here(run, 1) == 0
    assert [(e["number"], e["step"]) for e in events_of(run, "amendment_applied")] == [(3, 1), (4, 1)]
    assert [event["step"] for event in events_of(run, "checkpoint_committed")] == [6, 12, 18, 24]
    assert [event["step"] for event in events_of(run, "checkpoint_deleted")] == [6, 12]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_training_that_ends_for_an_amendment_has_a_checkpoint_of_that_step(
    steps_ahead: int,
    tmp_path: Path,
    make_run: MakeRun,
    train_here: TrainHere,
    events_of: EventsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.backends.torch_native.TorchNative.steps_ahead", steps_ahead)
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 24})
    give(run, end_after_step=7)
    assert train_here(run, 1) == 77
    (stopped,) = events_of(run, "train_stopped")
    assert (stopped["step"], stopped["reason"]) == (7, "amend")
    assert run.checkpoint(7).is_dir()
