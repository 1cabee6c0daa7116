"""One case of the benchmark ``gpu``: train a prepared run, and print what it took as JSON."""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from pathlib import Path

import torch

from benchmarks.measured import SKIP_STEPS
from conf.load import load
from conf.training_rules import CheckpointPolicy, SaveReason
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from trainer.backends.torch_native import TorchNative
from trainer.step.loop import Training
from trainer.step.training import memory_bytes, train_journal

_PROFILED_STEPS = 3


class _Never(CheckpointPolicy):
    """Saves nothing: a checkpoint of 1 B parameters is 13 GB."""

    def reason_to_save(self, step: int, *, stopping: bool = False) -> SaveReason | None:
        return None


class _Waiting(TorchNative):
    """Reads each step's metrics before the next step."""

    steps_ahead = 0


def main() -> None:
    """Train, and print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    run = RunPaths(arguments.run)
    config = load(run.config)
    backend = (_Waiting if arguments.wait else TorchNative)(config)
    training = Training(config, run, backend, train_journal(run, backend, 1))
    if not arguments.save:
        training.policy = _Never(config)
    notes = _profiled(training) if arguments.profile else []
    training.run()
    events = list(read_events(run))
    steps = [event for event in events if event["kind"] == "step"][_PROFILED_STEPS * arguments.profile :]
    stalls = [event["stall_s"] for event in events if event["kind"] == "checkpoint_written" and event.get("stall_s")]
    if stalls:
        notes.append(
            f"checkpoints stalled training for {', '.join(f'{s:.2f}' for s in stalls)} s (the first allocates)"
        )
    counted = steps[SKIP_STEPS:]
    result = {
        "steps_s": [event["step_s"] for event in steps],
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "peak_bytes": memory_bytes(backend.device)[1],
        "loss": steps[-1]["loss"],
        "data_wait": sum(event["data_wait_s"] for event in counted) / sum(event["step_s"] for event in counted),
        "notes": notes,
    }
    print(json.dumps(result))


def _profiled(training: Training) -> list[str]:
    """Profile some steps; return the operations that take most time, and what made the host wait for the device."""
    on_device = training.backend.device.type != "cpu"
    for _ in range(SKIP_STEPS):
        _step(training)
    if on_device:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught, torch.profiler.profile() as profiled:
        warnings.simplefilter("always")
        for _ in range(_PROFILED_STEPS):
            _step(training)
    if on_device:
        torch.cuda.set_sync_debug_mode("default")
    waits = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    rows = sorted(profiled.key_averages(), key=lambda row: -getattr(row, key))
    total = sum(getattr(row, key) for row in rows) or 1
    return [
        *(f"{getattr(row, key) / total:6.1%} {row.count:6d} x {row.key[:90]}" for row in rows[:20]),
        f"the host waited for the device at: {dict(waits) or 'no place'}",
    ]


def _step(training: Training) -> None:
    training.step += 1
    training._start_step()
    training._finish_steps(leave=training.backend.steps_ahead)


if __name__ == "__main__":
    main()
