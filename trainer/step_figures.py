"""What a step used, for its event: speed, share of the device's peak, and memory."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import mfu

#: Linux, proc(5): the second number is the resident pages.
_OWN_PAGES = Path("/proc/self/statm")


class StepFigures:
    """Computes the figures of a process's steps.

    Args:
        config: of the run.
        device: of this process.
        peak_flops_per_s: of one device; None if unknown, then MFU is unknown.
    """

    def __init__(self, config: Config, device: torch.device, peak_flops_per_s: float | None) -> None:
        self._config, self._device, self._peak_flops_per_s = config, device, peak_flops_per_s

    def of(self, step_s: float) -> dict[str, float | int | None]:
        """Return the fields of a step event that follow from its duration, and this process's memory. No waiting.

        Costs about 35 us on a CPU.
        """
        tokens_per_s = self._config.tokens_per_step / step_s
        current, peak = memory_bytes(self._device)
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self._config.world_size,
            "mfu": mfu(self._config, tokens_per_s, self._peak_flops_per_s),
            "memory_bytes": current,
            "peak_memory_bytes": peak,
        }


def memory_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return this process's memory where the model is, now and at most since its start; None if unknown.

    A device's own count is PyTorch's allocated memory. Reading it doesn't wait for the device.
    """
    facts = DEVICES.get(device.type)  # torch-xla's device has no row
    where = facts.memory if facts else "unknown"
    if where == "device":
        counts = torch.get_device_module(device).memory_stats(device)
        return counts.get("allocated_bytes.all.current"), counts.get("allocated_bytes.all.peak")
    return _host_memory_bytes() if where == "host" else (None, None)


def _host_memory_bytes() -> tuple[int | None, int]:
    current = None
    with suppress(OSError):
        current = int(_OWN_PAGES.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return current, max(peak, current or 0)  # the kernel updates the peak later than the pages
