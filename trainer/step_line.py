"""The line that rank 0 prints every tenth step, for people who read a run's logs."""

from __future__ import annotations

from typing import Any

from conf.schema import Config
from hlatctl.run.step_metrics import texts

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
        parts = [
            f"step {event['step']}/{self._config.total_steps}",
            f"tokens {event['tokens']:,}",
            *texts(event),
            f"data wait {event['data_wait_s'] / event['step_s']:.0%}",
        ]
        return "  ".join(parts)
