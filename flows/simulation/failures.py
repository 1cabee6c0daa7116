"""Draw the failures of a simulated cluster, each kind at a constant rate. Pure."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from conf.schema import FailureRatesConfig

_S_PER_RATE = 1000 * 3600.0
#: Rates of the whole cluster: there is one scheduler, storage, model and driver, whatever the number of nodes.
OF_CLUSTER = ("upgrade", "disk_full", "nan", "head_crash", "mlflow_outage")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure.

    Args:
        kind: a field of ``FailureRatesConfig``.
        host: its host; without meaning for failures of no host.
        after_s: seconds since the previous failure.
    """

    kind: str
    host: str
    after_s: float


class Failures:
    """An endless sequence of failures.

    Args:
        rates: per 1,000 node-hours, those of ``OF_CLUSTER`` per 1,000 hours.
        hosts: of the cluster, including spare ones.
        random_numbers: their source.
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
