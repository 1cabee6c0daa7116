"""PyTorch's profiler on steps of running training, and the table of a profile's operators."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths, table_name, trace_name
from tests.trainer.conftest import EventsOf, MakeRun, Ranks, TrainHere
from tests.trainer.step.test_training import give
from trainer.backends.torch_native import TorchNative
from trainer.step.profiling import tables


def operator(key: str, cpu_us: float, device_us: float, memory_bytes: int) -> Any:
    return SimpleNamespace(
        key=key,
        count=12_345_678,
        self_cpu_time_total=cpu_us,
        cpu_time_total=10 * cpu_us,
        self_device_time_total=device_us,
        self_cpu_memory_usage=0,
        self_device_memory_usage=memory_bytes,
    )


def test_the_operators_of_a_device_are_ordered_by_its_time_then_by_its_memory_and_fit_120_columns() -> None:
    operators = [
        operator("aten::" + "long" * 20, 900_000_000.0, 250_000_000.0, -(1000 << 40)),
        operator("aten::mm", 100_000_000.0, 750_000_000.0, 3 << 20),
    ]
    by_time, by_memory = (text.splitlines() for text in tables(operators, on_device=True, memory=True).split("\n\n"))
    assert [line.split()[0] for line in by_time[1:]] == ["aten::mm", "aten::" + "long" * 7 + "…"]
    assert [line.split()[0] for line in by_memory[1:]] == ["aten::mm", "aten::" + "long" * 7 + "…"]
    assert by_time[1].split()[1:] == [
        *["12,345,678", "100,000.000", "10.0%", "1,000,000.000"],
        *["750,000.000", "75.0%", "3", "MiB"],
    ]
    assert by_time[2].endswith("-1000 TiB")
    assert max(map(len, [*by_time, *by_memory])) <= 120


def test_a_cpu_has_no_columns_of_a_device() -> None:
    (head, row) = tables([operator("aten::mm", 2_000.0, 0.0, 0)], on_device=False, memory=False).splitlines()
    assert head.split() == ["OPERATOR", "CALLS", "SELF", "CPU", "ms", "SHARE", "CPU", "ms"]
    assert row.split() == ["aten::mm", "12,345,678", "2.000", "100.0%", "20.000"]


def order(**fields: Any) -> dict[str, Any]:
    return {"number": 1, "steps": 3, "ranks": [0], "memory": False, **fields}


def recorded_steps(run: RunPaths, rank: int) -> int:
    """Return how many steps a rank's trace has."""
    trace = json.loads(gzip.decompress((run.profile(1) / trace_name(rank)).read_bytes()))
    return len({event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")})


def losses(events_of: EventsOf, run: RunPaths) -> list[float]:
    return [event["loss"] for event in events_of(run, "step")]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_steps_of_running_training_are_traced_and_train_the_same(
    steps_ahead: int,
    tmp_path: Path,
    make_run: MakeRun,
    train_here: TrainHere,
    events_of: EventsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchNative, "steps_ahead", steps_ahead)
    plain, run = make_run(tmp_path / "plain"), make_run(tmp_path / "run")
    give(run, profile=order(memory=True))
    assert train_here(run, 1) == train_here(plain, 1) == 0
    (made,) = events_of(run, "profiled")
    assert (made["first_step"], made["step"]) == (4 + steps_ahead, 6 + steps_ahead), "two steps of warm-up"
    assert recorded_steps(run, 0) == 3
    by_time, by_memory = (run.profile(1) / table_name(0)).read_text(encoding="utf-8").split("\n\n")
    assert by_time.split()[:2] == ["OPERATOR", "CALLS"]
    assert "aten::" in by_time
    assert "SELF MEMORY" in by_memory.splitlines()[0]
    assert max(map(len, [*by_time.splitlines(), *by_memory.splitlines()])) <= 120
    assert made["bytes"] == sum(path.stat().st_size for path in run.profile(1).iterdir())
    assert [path.name for path in run.profiles.iterdir()] == ["0001"], "nothing half is left"
    assert losses(events_of, run) == losses(events_of, plain)


def test_a_profiler_that_fails_does_not_end_training(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("trainer.step.profiling.profile.export_chrome_trace", fail)
    run = make_run(tmp_path / "run")
    give(run, profile=order())
    assert train_here(run, 1) == 0
    (failed,) = events_of(run, "profile_failed")
    assert failed["message"] == "RuntimeError: No space left on device"
    assert list(run.profiles.iterdir()) == []


def test_training_that_ends_first_leaves_nothing_of_the_profile(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "run", train={"max_steps": 5})
    give(run, profile=order())
    assert train_here(run, 1) == 0
    (failed,) = events_of(run, "profile_failed")
    assert failed["message"] == "training ended before the last of its steps"
    assert not run.profiles.exists()


@pytest.mark.parametrize("damage", [{"steps": 10**9}, {"ranks": "0"}, {"ranks": []}, {"folder": "/"}])
def test_a_damaged_order_is_not_followed(
    damage: dict[str, Any], tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "run", train={"max_steps": 2})
    give(run, profile=order(**damage))
    assert train_here(run, 1) == 0
    assert not events_of(run, "profile_failed")


@pytest.mark.processes
def test_the_ranks_that_were_asked_record_the_same_steps(tmp_path: Path, make_run: MakeRun, ranks: Ranks) -> None:
    run = make_run(tmp_path / "run", cluster={"processes_per_node": 2}, parallel={"data_parallel": "fsdp"})
    give(run, profile=order(ranks=[1]))
    ranks(2, [{"work": "train", "run": os.fspath(run.root), "attempt": 1}])
    asked = {"kind": "profile_requested", "seq": 1, "time_unix_s": 0.0, "attempt": 1, "writer": "operator"}
    (made,) = fold([{**asked, **order(ranks=[1])}, *read_events(run)]).profiles
    assert (made.status, made.last_step - made.first_step) == ("done", 2)
    assert sorted(path.name for path in run.profile(1).iterdir()) == sorted((trace_name(1), table_name(1)))
    assert recorded_steps(run, 1) == 3
