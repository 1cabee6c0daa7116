"""The line that rank 0 prints every tenth step, for people who read a run's logs."""

from __future__ import annotations

from typing import Any

from conf.schema import Config

#: As torchtitan's ``log_freq``.
EVERY_STEPS = 10


class StepLine:
    """Makes the lines of an attempt.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._last_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step gets a line: the first of the attempt, and every tenth."""
        due = self._last_step is None or step % EVERY_STEPS == 0 or step == self._config.total_steps
        self._last_step = step if due else self._last_step
        return due

    def text(self, event: dict[str, Any]) -> str:
        """Return the line of a step from the fields of its event. What is unknown is left out."""
        mfu, peak_bytes = event["mfu"], event["peak_memory_bytes"]
        parts = [
            f"step {event['step']}/{self._config.total_steps}",
            f"tokens {event['tokens']:,}",
            f"loss {event['loss']:.4f}",
            f"grad norm {event['grad_norm']:.3f}",
            f"lr {event['lr']:.2e}",
            f"{event['tokens_per_s']:,.0f} tokens/s",
            *([] if mfu is None else [f"MFU {mfu:.1%}"]),
            f"data wait {event['data_wait_s'] / event['step_s']:.0%}",
            *([] if peak_bytes is None else [f"memory {peak_bytes / 2**30:.2f} GiB"]),
        ]
        return "  ".join(parts)
