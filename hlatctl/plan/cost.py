"""Days, accelerator-hours and dollars of a run, and of the same tokens on other hardware; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config
from conf.sizes import flops_per_token

_HOUR_S, _DAY_S = 3600.0, 86400.0
#: HLAT compares the cost of this many tokens (arXiv 2404.10630, section 4).
COMPARED_TOKENS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run costs without failures.

    Args:
        accelerator_hours: of all processes' devices.
        usd: None without ``cluster.price_usd_per_node_hour``, like all dollars.
        baseline_usd_per_4m_tokens: on ``cluster.baseline``; None if that is not set.
    """

    days: float
    node_hours: float
    accelerator_hours: float
    usd: float | None
    usd_per_4m_tokens: float | None
    baseline_usd_per_4m_tokens: float | None

    @property
    def of_baseline_fraction(self) -> float | None:
        """This run's cost as a share of the baseline's."""
        if self.usd_per_4m_tokens is None or self.baseline_usd_per_4m_tokens is None:
            return None
        return self.usd_per_4m_tokens / self.baseline_usd_per_4m_tokens


def cost(config: Config, step_s: float) -> Cost:
    """Return the cost of all steps at ``step_s`` seconds each."""
    run_s = step_s * config.total_steps
    node_hours = run_s / _HOUR_S * config.cluster.paid_nodes
    price = config.cluster.price_usd_per_node_hour
    usd = None if price is None else node_hours * price
    return Cost(
        days=run_s / _DAY_S,
        node_hours=node_hours,
        accelerator_hours=run_s / _HOUR_S * config.world_size,
        usd=usd,
        usd_per_4m_tokens=None if usd is None else usd * COMPARED_TOKENS / config.total_tokens,
        baseline_usd_per_4m_tokens=baseline_usd_per_4m_tokens(config),
    )


def baseline_usd_per_4m_tokens(config: Config) -> float | None:
    """Return the cost of the same model's tokens on ``cluster.baseline``; None if a value of it is not set.

    Dollars per FLOP times FLOPs per token: the number of nodes cancels out.
    """
    other = config.cluster.baseline
    if other.price_usd_per_node_hour is None or other.flops_per_s_per_node is None or other.mfu_fraction is None:
        return None
    node_hours = (
        COMPARED_TOKENS
        * flops_per_token(config.model, config.train.seq_len)
        / (other.flops_per_s_per_node * other.mfu_fraction)
        / _HOUR_S
    )
    return node_hours * other.price_usd_per_node_hour
