"""Shared parts of the peers' programs: arguments, packages, tokens, times of steps, and output."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conf.schema import Config
from trainer.step.training import memory_bytes

#: Folders with the peers' packages, separated as in ``PATH``. What is installed comes first.
PACKAGES_ENV = "HLATCTL_BENCH_PEERS"


def add_packages() -> None:
    """Let this process import packages from the folders of ``HLATCTL_BENCH_PEERS``."""
    sys.path.extend(filter(None, os.environ.get(PACKAGES_ENV, "").split(os.pathsep)))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=Path, help="of each step: .npy, (steps, sequences, length + 1); none: random")
    return parser


def micro_batches(config: Config, given: argparse.Namespace, device: torch.device) -> Iterator[list[Tensor]]:
    """Yield each step's micro-batches on the device, each (sequences, length + 1) int64. The host doesn't wait."""
    shape = (given.steps, config.train.global_batch_size // given.processes, config.train.seq_len + 1)
    if given.tokens is None:
        steps = torch.randint(config.model.vocab_size, shape)
    else:
        steps = torch.from_numpy(np.load(given.tokens)[: given.steps]).long()
    for step in steps.to(device):
        yield list(step.chunk(config.grad_accum_steps))


class StepTimes:
    """Seconds from the end of each step to the end of the next, by the device's clock: nothing waits for it.

    Args:
        device: that trains; a CPU has no clock of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._ends = device, list[Any]()
        self.end_step()

    def end_step(self) -> None:
        """Mark the end of the work issued so far."""
        if self._device.type == "cpu":
            self._ends.append(time.perf_counter())
            return
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        self._ends.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds of each step; waits for the last one."""
        pairs = list(zip(self._ends[:-1], self._ends[1:], strict=True))
        if self._device.type == "cpu":
            return [end - start for start, end in pairs]
        self._ends[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def report(model: nn.Module, times: StepTimes, device: torch.device, loss: Tensor) -> None:
    """Print what was measured, as a line of JSON that ``measured.Measured`` reads."""
    printed = {
        "steps_s": times.seconds(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": memory_bytes(device)[1],
        "loss": loss.item(),
    }
    print(json.dumps(printed))
