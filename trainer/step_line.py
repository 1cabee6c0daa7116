"""The line that rank 0 prints every tenth step, for people who read a run's logs."""

from __future__ import annotations

import resource
import sys

import torch

from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import flops_per_token

#: As torchtitan's ``log_freq``.
EVERY_STEPS = 10


class StepLine:
    """Makes the lines of an attempt.

    Args:
        config: of the run.
        device: of this process.
        peak_flops_per_s: of one device; None if unknown, then lines have no MFU.
    """

    def __init__(self, config: Config, device: torch.device, peak_flops_per_s: float | None) -> None:
        self._config, self._device = config, device
        per_token = flops_per_token(config.model, config.train.seq_len)
        self._mfu_s = None
        if peak_flops_per_s:
            self._mfu_s = per_token * config.tokens_per_step / (peak_flops_per_s * config.world_size)
        self._last_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step gets a line: the first of the attempt, and every tenth."""
        due = self._last_step is None or step % EVERY_STEPS == 0 or step == self._config.total_steps
        self._last_step = step if due else self._last_step
        return due

    def text(self, step: int, *, loss: float, grad_norm: float, lr: float, step_s: float, data_wait_s: float) -> str:
        """Return the line of a step."""
        parts = [
            f"step {step}/{self._config.total_steps}",
            f"tokens {self._config.tokens_at(step):,}",
            f"loss {loss:.4f}",
            f"grad norm {grad_norm:.3f}",
            f"lr {lr:.2e}",
            f"{self._config.tokens_per_step / step_s:,.0f} tokens/s",
            *([f"MFU {self._mfu_s / step_s:.1%}"] if self._mfu_s else []),
            f"data wait {data_wait_s / step_s:.0%}",
            f"memory {peak_memory_bytes(self._device) / 2**30:.2f} GiB",
        ]
        return "  ".join(parts)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used: of the device, or of the host if PyTorch counts only that."""
    if DEVICES[device.type].counts_memory:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
