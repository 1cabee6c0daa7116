"""The random numbers of a simulated cluster: the curves of steps, failures at constant rates, and durations. Pure.

The curves are typical ones with noise, not a prediction.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from conf.schema import Config, FailureRatesConfig, SimulationConfig
from conf.sizes import checkpoint_bytes, flops_per_token, parameters
from conf.training_rules import learning_rate
from hlatctl.plan.step_time import step_time_s

#: The final loss: E + A / N^a + B / D^b for N parameters and D tokens (Chinchilla, arXiv 2203.15556, equation 10).
_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28
#: That law is for large models; a small model's loss ends at this fraction of the loss of guessing, or below.
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


_S_PER_RATE = 1000 * 3600.0
#: Rates of the whole cluster: there is one scheduler, storage, model and driver, whatever the number of nodes.
OF_CLUSTER = ("upgrade", "disk_full", "nan", "head_crash", "mlflow_outage")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure.

    Args:
        kind: a field of ``FailureRatesConfig``.
        host: its host; meaningless for failures without a host.
        after_s: seconds since the previous failure.
    """

    kind: str
    host: str
    after_s: float


class Failures:
    """An endless sequence of failures.

    Args:
        rates: failures per 1,000 node-hours; those of ``OF_CLUSTER`` per 1,000 hours.
        hosts: hosts of the cluster, including spare ones.
        random_numbers: source of random numbers.
    """

    def __init__(self, rates: FailureRatesConfig, hosts: tuple[str, ...], random_numbers: random.Random) -> None:
        self._hosts, self._random = hosts, random_numbers
        per_s = {kind: float(rate) / _S_PER_RATE for kind, rate in asdict(rates).items()}
        self._kinds = {kind: rate * (1 if kind in OF_CLUSTER else len(hosts)) for kind, rate in per_s.items()}

    def next(self) -> Failure | None:
        """Return the next failure; None if all rates are 0."""
        total_per_s = sum(self._kinds.values())
        if not total_per_s:
            return None
        kind = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
        return Failure(kind=kind, host=self._random.choice(self._hosts), after_s=self._random.expovariate(total_per_s))


#: Model FLOP/s of one process if the plan doesn't know the hardware: one core of a common CPU.
_UNKNOWN_FLOPS_PER_S = 20e9


def step_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds of one step on healthy nodes: as configured, or as planned, or for a common CPU."""
    planned_s = settings.step_s or step_time_s(config)
    if planned_s is not None:
        return planned_s
    flops = flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return flops / (config.world_size * _UNKNOWN_FLOPS_PER_S)


def save_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds from the start of a checkpoint until all its files are in the shared storage."""
    return checkpoint_bytes(config) / settings.storage_bytes_per_s


def stall_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds that training waits for a checkpoint: for the copy to host memory, or for the files."""
    if config.checkpoint.mode == "sync":
        return save_s(config, settings)
    per_node_bytes = checkpoint_bytes(config) / config.cluster.nodes
    return per_node_bytes / settings.host_copy_bytes_per_s


def load_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds to read a checkpoint; one replica reads it and sends it to the others."""
    return save_s(config, settings)


def export_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds to read a checkpoint and write its weights, which are a third of it."""
    return save_s(config, settings) * 4 / 3
