"""What breaks on a simulated cluster and when: drawn, each kind at its own constant rate. Pure."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from conf.schema import FailureRatesConfig

_S_PER_RATE = 1000 * 3600.0
#: Of one node, the head's.
_OF_THE_HEAD = ("head_crash", "mlflow_outage")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One thing that breaks.

    Args:
        kind: a field of ``FailureRatesConfig``.
        host: where, as far as it has a place.
        after_s: since the one before.
    """

    kind: str
    host: str
    after_s: float


class Failures:
    """An endless sequence of them.

    Args:
        rates: per 1,000 node-hours.
        hosts: of the cluster, spare ones too.
        random_numbers: that they are drawn with.
    """

    def __init__(self, rates: FailureRatesConfig, hosts: tuple[str, ...], random_numbers: random.Random) -> None:
        self._hosts, self._random = hosts, random_numbers
        per_s = {kind: float(rate) / _S_PER_RATE for kind, rate in asdict(rates).items()}
        self._kinds = {kind: rate * (1 if kind in _OF_THE_HEAD else len(hosts)) for kind, rate in per_s.items()}

    def next(self) -> Failure | None:
        """The next one; None if nothing ever breaks."""
        total_per_s = sum(self._kinds.values())
        if not total_per_s:
            return None
        kind = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
        return Failure(kind=kind, host=self._random.choice(self._hosts), after_s=self._random.expovariate(total_per_s))
