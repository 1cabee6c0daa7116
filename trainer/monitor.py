"""What is watched while training: spikes, a loss too good to be true, slow ranks. Pure; journalling is the loop's."""

from __future__ import annotations

import statistics
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
#: How often the processes' times are compared, each being the median of so many steps.
RANK_TIMES_EVERY_STEPS = 20


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
            "grad_norms": list(self._norms),
            "losses": list(self._losses),
            "spike": self._spike,
            "leaking": self._leaking,
        }

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


class RankTimes:
    """How long each process needs for its own work of a step, compared with the others' once a window of steps.

    A process's own work is all that it does before it waits for the others to exchange gradients. Where they exchange
    in the middle of it (tensor parallel, FSDP, pipeline), it holds that waiting too, and tells slow replicas apart, or
    nothing at all (FSDP).

    Args:
        factor: a process that takes more than this many times the median is slow.
        steps: slow for this many steps in a row, it is a straggler and named once.
    """

    def __init__(self, factor: float, steps: int) -> None:
        self._factor, self._windows = factor, -(-steps // RANK_TIMES_EVERY_STEPS)
        self._own_s: list[float] = []
        self._slow: dict[int, int] = {}

    def add(self, own_s: float) -> None:
        """Take this process's time of one step."""
        self._own_s.append(own_s)

    @property
    def full(self) -> bool:
        """It is time to compare; for all processes after the same step."""
        return len(self._own_s) >= RANK_TIMES_EVERY_STEPS

    def take_s(self) -> float:
        """This process's median step of the window, which begins anew."""
        median_s = statistics.median(self._own_s)
        self._own_s.clear()
        return median_s

    def compare(self, step: int, ranks: list[tuple[str, float]]) -> list[Sign]:
        """What is worth telling of (host, seconds) by rank.

        Of two processes the faster one is the median: a slow one must not raise what it is measured against.
        """
        median_s = statistics.median_low([own_s for _, own_s in ranks])
        ratios = [own_s / max(median_s, 1e-9) for _, own_s in ranks]
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, ratio in enumerate(ratios) if ratio > self._factor}
        slowest = max(range(len(ranks)), key=ratios.__getitem__)
        times = {
            "step": step,
            "median_s": median_s,
            "slowest_rank": slowest,
            "host": ranks[slowest][0],
            "ratio": ratios[slowest],
            "max_s": ranks[slowest][1],
            "min_s": min(own_s for _, own_s in ranks),
        }
        named = [rank for rank, windows in self._slow.items() if windows == self._windows]
        return [Sign("rank_times", times), *(self._straggler(step, r, ranks[r][0], ratios[r]) for r in named)]

    def _straggler(self, step: int, rank: int, host: str, ratio: float) -> Sign:
        steps = self._windows * RANK_TIMES_EVERY_STEPS
        message = (
            f"step {step}: rank {rank} on {host} has taken {ratio:.1f} times the median process's time for {steps} "
            "steps; all others wait for it"
        )
        return Sign("straggler", {"step": step, "rank": rank, "host": host, "ratio": ratio, "message": message})
