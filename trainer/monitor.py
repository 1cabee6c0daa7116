"""What is watched while training: gradient spikes, a loss too good to be true. Pure; journalling is the loop's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

#: Steps that the running means cover, and how far above its mean a gradient norm is a spike (HLAT, arXiv 2404.10630,
#: section 4.3).
WINDOW_STEPS = 20
THRESHOLD = 0.1
#: Text holds more information than this, nats per token: no model of real text gets there, one that sees the answers
#: does (HLAT's authors saw a wrong mask only after 10,000 steps).
LEAK_LOSS_NATS = 0.5
#: Relative difference between copies of a weight that is no rounding any more.
DRIFT_LIMIT = 1e-4
#: How often copies are compared.
DRIFT_EVERY_STEPS = 100


@dataclass(frozen=True)
class Sign:
    """Something worth an event.

    Args:
        kind: of the event.
        fields: of the event.
    """

    kind: str
    fields: dict[str, Any]


class Monitor:
    """Takes each step's loss and gradient norm and tells what is remarkable.

    A spike begins with a norm above the mean of the last 20 steps by more than 0.1, and ends with the first that is
    not; its length is the number of steps in between.

    Args:
        state: as :attr:`state` gave it; a checkpoint keeps it.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._norms: deque[float] = deque(state.get("grad_norms", []), maxlen=WINDOW_STEPS)
        self._losses: deque[float] = deque(state.get("losses", []), maxlen=WINDOW_STEPS)
        self._spike: dict[str, Any] | None = state.get("spike")
        self._leaking = bool(state.get("leaking"))

    @property
    def state(self) -> dict[str, Any]:
        """All that the monitor knows, as JSON."""
        return {
            "grad_norms": list(self._norms), "losses": list(self._losses), "spike": self._spike,
            "leaking": self._leaking,
        }  # fmt: skip

    def observe(self, step: int, loss: float, grad_norm: float) -> list[Sign]:
        """Take a step; what is remarkable about it, mostly nothing."""
        return [*self._observe_norm(step, grad_norm), *self._observe_loss(step, loss)]

    def _observe_norm(self, step: int, grad_norm: float) -> list[Sign]:
        full = len(self._norms) == WINDOW_STEPS
        mean = sum(self._norms) / max(1, len(self._norms))
        self._norms.append(grad_norm)
        if full and grad_norm > mean + THRESHOLD:
            if self._spike:
                self._spike = {**self._spike, "peak_grad_norm": max(self._spike["peak_grad_norm"], grad_norm)}
                return []
            self._spike = {"step": step, "peak_grad_norm": grad_norm}
            return [Sign("gradient_spike", {"step": step, "grad_norm": grad_norm, "mean": mean})]
        ended, self._spike = self._spike, None
        return [Sign("gradient_spike_ended", {**ended, "length_steps": step - ended["step"]})] if ended else []

    def _observe_loss(self, step: int, loss: float) -> list[Sign]:
        self._losses.append(loss)
        mean = sum(self._losses) / len(self._losses)
        leaking = len(self._losses) == WINDOW_STEPS and mean < LEAK_LOSS_NATS
        begins, self._leaking = leaking and not self._leaking, leaking
        if not begins:
            return []
        message = (
            f"step {step}: the loss of the last {WINDOW_STEPS} steps is {mean:.3f} nats per token, too good to be "
            "true. Does the model see what it has to predict (a wrong mask, or targets that are not shifted)?"
        )
        return [Sign("alarm", {"step": step, "what": "loss_to_zero", "message": message})]


def drift_alarm(step: int, difference: float) -> list[Sign]:
    """What to say of the largest relative difference between copies of a weight."""
    if difference <= DRIFT_LIMIT:
        return []
    message = (
        f"step {step}: copies of a weight that should be equal on several processes differ by {difference:.1e} of its "
        "norm; they drift apart when their updates are not the same (a gradient that is not reduced, unequal rounding)"
    )
    return [Sign("alarm", {"step": step, "what": "weight_drift", "difference": difference, "message": message})]
