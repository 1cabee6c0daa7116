"""The driver's orders to a running attempt, and the figures and lines of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.devices import DEVICES
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere
from trainer.backends.base import ENDS, NEWS, STOP, StepMetrics
from trainer.step import training
from trainer.step.training import Orders, StepFigures, StepLine, memory_bytes


def give(run: RunPaths, **order: Any) -> None:
    files.write_json(run.orders(1), {"numbers": [], "values": {}, "end_after_step": None, "profile": None, **order})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr("trainer.step.training.time.monotonic", lambda: now_s[0])
    return now_s


def test_new_orders_are_announced_until_they_are_taken(tmp_path: Path, clock: list[float]) -> None:
    run = RunPaths(tmp_path)
    mine = Orders(run, 1)
    assert mine.signal(1) == 0
    give(run, numbers=[2], values={"checkpoint.keep": 5})
    assert mine.signal(2) == 0, "the file is not read at every step"
    clock[0] += training._LOOK_EVERY_S
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
    clock[0] += training._FRESH_S
    assert eager.signal(11) == 0, "nobody would start the next attempt"
    give(run, end_after_step=10)
    clock[0] += training._LOOK_EVERY_S
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


CONFIG = Config()
TWO = replace(CONFIG, cluster=replace(CONFIG.cluster, processes_per_node=2))
CPU = torch.device("cpu")
FLOPS_PER_TOKEN = 1e6


def test_mfu_is_the_used_share_of_all_devices_and_none_without_the_peak() -> None:
    used = FLOPS_PER_TOKEN * TWO.tokens_per_step / 0.5
    assert StepFigures(TWO, CPU, used / 2 / 0.4, FLOPS_PER_TOKEN).of(0.5)["mfu"] == pytest.approx(0.4)
    assert StepFigures(TWO, CPU, None, FLOPS_PER_TOKEN).of(0.5)["mfu"] is None


def test_each_device_has_its_share_of_the_tokens() -> None:
    figures = StepFigures(TWO, CPU, None, FLOPS_PER_TOKEN).of(0.5)
    assert figures["tokens_per_s"] == 2 * TWO.tokens_per_step
    assert figures["tokens_per_s_per_device"] == TWO.tokens_per_step


def test_the_memory_of_a_cpu_is_that_of_the_process_and_grows_with_it() -> None:
    before, _ = memory_bytes(CPU)
    held = bytearray(64 << 20)
    held[:: 4 << 10] = b"x" * len(held[:: 4 << 10])  # touch every page
    after, peak = memory_bytes(CPU)
    assert before is not None
    assert after is not None
    assert peak is not None
    assert before + (48 << 20) < after <= peak < 1 << 40


def test_the_memory_of_a_device_is_what_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"allocated_bytes.all.current": 5, "allocated_bytes.all.peak": 7}
    module = SimpleNamespace(memory_stats=lambda device: counts)
    monkeypatch.setattr("trainer.step.training.torch.get_device_module", lambda device: module)
    assert memory_bytes(torch.device("cuda", 1)) == (5, 7)


def test_memory_that_nothing_counts_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["neuron"])
    assert memory_bytes(CPU) == (None, None)
    assert memory_bytes(torch.device("xla", 0)) == (None, None), "the device of backend nxd"


EVENT: dict[str, Any] = {
    "step": 20,
    "tokens": 81920,
    "loss": 3.5,
    "grad_norm": 0.25,
    "lr": 1e-3,
    "step_s": 0.5,
    "data_wait_s": 0.05,
    "tokens_per_s": 8192.0,
    "mfu": 0.4,
    "peak_memory_bytes": 3 << 29,
}


def test_the_first_step_every_tenth_and_the_last_one_get_a_line() -> None:
    line = StepLine(CONFIG)
    total = CONFIG.total_steps
    assert [step for step in (13, 14, 20, 21, 30, total) if line.is_due(step)] == [13, 20, 30, total]


def test_a_line_says_what_a_reader_looks_for() -> None:
    assert StepLine(CONFIG).text(EVENT).split("  ") == [
        f"step 20/{CONFIG.total_steps}",
        "tokens 81,920",
        "loss 3.5000",
        "gradient norm 0.250",
        "lr 1.00e-03",
        "8,192 tokens/s",
        "MFU 40.0%",
        "memory 1.50 GiB",
        "0.5 s/step",
        "data wait 10%",
    ]


def test_a_line_leaves_out_what_is_unknown() -> None:
    line = StepLine(CONFIG).text({**EVENT, "mfu": None, "peak_memory_bytes": None})
    assert "MFU" not in line
    assert "memory" not in line
