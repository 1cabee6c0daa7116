"""What is watched while training: gradient spikes. Pure; journalling is the loop's."""

from __future__ import annotations

from collections import deque

#: Steps that the running mean covers, and how far above it a spike is (HLAT, arXiv 2404.10630, section 4.3).
WINDOW_STEPS = 20
THRESHOLD = 0.1


class SpikeMonitor:
    """Tells whether a step's gradient norm is above the mean of the last 20 steps by more than 0.1.

    Args:
        recent: the norms of the last steps, oldest first, as :attr:`recent` gave them.
    """

    def __init__(self, recent: list[float] | None = None) -> None:
        self._recent = deque(recent or [], maxlen=WINDOW_STEPS)

    @property
    def recent(self) -> list[float]:
        """The norms that the mean is taken of; a checkpoint keeps them."""
        return list(self._recent)

    def observe(self, grad_norm: float) -> float | None:
        """Take a step's norm; the mean that it exceeds if it is a spike, else None (and before 20 steps are known)."""
        full = len(self._recent) == WINDOW_STEPS
        mean = sum(self._recent) / max(1, len(self._recent))
        self._recent.append(grad_norm)
        return mean if full and grad_norm > mean + THRESHOLD else None
