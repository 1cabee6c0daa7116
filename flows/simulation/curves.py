"""The numbers of simulated steps: typical curves with noise. They are not a prediction."""

from __future__ import annotations

import math
import random
from typing import Any

from conf.schedule import learning_rate
from conf.schema import Config
from conf.sizes import parameters

#: The final loss: E + A / N^a + B / D^b of N parameters and D tokens (Chinchilla, arXiv 2203.15556, equation 10).
_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28
#: That law is for large models; the loss of a small one ends at this fraction of that of guessing, or below.
_MOST_OF_GUESSING = 0.45
#: The loss falls from that of guessing by a power of the steps.
_DECAY, _DECAY_STEPS = 0.5, 10.0
_NOISE = 0.004
_BEST_RATE, _RATE_WEIGHT, _SEED_WEIGHT = 3e-3, 0.2, 0.01


class Curves:
    """The numbers of each step of a run, with noise from ``random_numbers``."""

    def __init__(self, config: Config, random_numbers: random.Random) -> None:
        self._config, self._random = config, random_numbers
        self._parameters = parameters(config.model).total

    def step(self, step: int) -> dict[str, Any]:
        """Return loss, norms and learning rate of an optimizer step."""
        config, noise = self._config, self._random.gauss(0.0, 1.0)
        warmth = math.exp(-step / max(20.0, 0.2 * config.warmup_steps))
        progress = step / config.total_steps
        return {
            "loss": self.loss(step) * (1 + _NOISE * noise),
            "grad_norm": (0.22 + 0.1 / math.sqrt(step) + 2.5 * warmth) * math.exp(0.08 * self._random.gauss(0.0, 1.0)),
            "param_norm": self._first_norm * (1 + 0.9 * math.sqrt(progress) - 0.25 * progress),
            "lr": learning_rate(step, config),
        }

    def loss(self, step: int) -> float:
        """Return the loss without noise, in nats per token."""
        guessing = math.log(self._config.model.vocab_size)
        law = (
            self._misfit + _E + _A / float(self._parameters) ** _ALPHA + _B / float(self._config.total_tokens) ** _BETA
        )
        last = min(law, _MOST_OF_GUESSING * guessing) + self._misfit
        return float(last + (guessing - last) * (1 + step / _DECAY_STEPS) ** -_DECAY)

    @property
    def _misfit(self) -> float:
        """Makes the arms of a simulated sweep differ: one learning rate is best, and seeds differ a little."""
        config = self._config
        return _RATE_WEIGHT * math.log10(config.optimizer.lr / _BEST_RATE) ** 2 + _SEED_WEIGHT * math.sin(config.seed)

    @property
    def _first_norm(self) -> float:
        return float(self._config.model.initializer_range) * math.sqrt(self._parameters)
