"""The budget of a run: FLOPs, time, cost, disk, loader and tracking volume, epochs and checkpoint interval; pure.

Parameters and checkpoint sizes are in ``conf.sizes``. Both optima of the checkpoint interval take the cost of a save
and the mean time between failures in seconds. They return the seconds of training between the end of one save and the
start of the next. Failures are assumed to be random with a constant rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from conf.sizes import checkpoint_bytes, checkpoints_kept, flops_per_token, parameters, runs_dir_bytes
from conf.stages import source_tokens
from conf.tracking import copied_steps

#: Properties of a configuration that are part of its budget.
_COUNTED = (
    "total_steps",
    "tokens_per_step",
    "total_tokens",
    "milestones",
    "world_size",
    "data_parallel_size",
    "micro_batch_size",
    "grad_accum_steps",
)


def budget(config: Config) -> dict[str, Any]:
    """Return what a run needs, for programs.

    ``flops_per_token`` is of a forward and a backward pass, ``checkpoints_kept`` the maximum without the one that is
    being written, and ``disk_bytes`` the size of these and of that one.
    """
    counts, per_token = parameters(config.model), flops_per_token(config.model, config.train.seq_len)
    return {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "flops_per_token": per_token,
        "total_flops": total_flops(config),
        **{name: getattr(config, name) for name in _COUNTED},
        "checkpoint_bytes": checkpoint_bytes(config),
        "checkpoints_kept": checkpoints_kept(config),
        "disk_bytes": runs_dir_bytes(config),
    }


def total_flops(config: Config) -> int:
    """Return the FLOPs of the whole run, forward and backward."""
    parts = [(stage.config, stage.tokens) for stage in config.stages] or [(config, config.total_tokens)]
    return sum(flops_per_token(of.model, of.train.seq_len) * tokens for of, tokens in parts)


_HOUR_S, _DAY_S = 3600.0, 86400.0
#: HLAT compares the cost of this many tokens (arXiv 2404.10630, section 4).
COMPARED_TOKENS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run costs without failures.

    Args:
        accelerator_hours: total over all processes' devices.
        usd: None without ``cluster.price_usd_per_node_hour``, like all dollars.
        baseline_usd_per_4m_tokens: price on ``cluster.baseline``; None if that is not set.
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


def cost(config: Config, step_s: float, *, steps: int | None = None) -> Cost:
    """Return the cost of so many steps, by default all, at ``step_s`` seconds each on average."""
    tokens = config.total_tokens if steps is None and config.stages else None
    steps = config.total_steps if steps is None else steps
    tokens = steps * config.tokens_per_step if tokens is None else tokens
    run_s = step_s * steps
    node_hours = run_s / _HOUR_S * config.cluster.paid_nodes
    price = config.cluster.price_usd_per_node_hour
    usd = None if price is None else node_hours * price
    return Cost(
        days=run_s / _DAY_S,
        node_hours=node_hours,
        accelerator_hours=run_s / _HOUR_S * config.world_size,
        usd=usd,
        usd_per_4m_tokens=None if usd is None or not tokens else usd * COMPARED_TOKENS / tokens,
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


#: Journal bytes of an optimizer step with its share of rarer events: 306 steps of the quickstart wrote 114,915 bytes
#: without the field `batch`, which adds 3,564.
JOURNAL_BYTES_PER_STEP = 387
#: Rows per step in MLflow, and a row's bytes in its SQLite database with indexes: 2,496 rows took 716,800.
MLFLOW_ROWS_PER_STEP = 8
MLFLOW_BYTES_PER_ROW = 287


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Volumes of a run besides the sizes in ``conf.sizes``. Rates are None without a step time.

    Args:
        loader_tokens_per_s: rate of each replica's loader.
        checkpoint_every_s: time between checkpoints.
        checkpoint_bytes_per_s: rate at which all nodes together finish a checkpoint before the next one begins.
    """

    loader_tokens_per_s: float | None
    checkpoint_every_s: float | None
    checkpoint_bytes_per_s: float | None
    journal_bytes: int
    mlflow_bytes: int


def volume(config: Config, step_s: float | None) -> Volume:
    """Return the volumes of the whole run."""
    steps = config.total_steps
    every_s = None if step_s is None else step_s * config.checkpoint.every_steps
    tracked = config.tracking.enabled
    return Volume(
        loader_tokens_per_s=None if step_s is None else config.tokens_per_step / step_s / config.data_parallel_size,
        checkpoint_every_s=every_s,
        checkpoint_bytes_per_s=None if every_s is None else checkpoint_bytes(config) / every_s,
        journal_bytes=steps * JOURNAL_BYTES_PER_STEP,
        mlflow_bytes=copied_steps(steps) * MLFLOW_ROWS_PER_STEP * MLFLOW_BYTES_PER_ROW if tracked else 0,
    )


#: Up to about 4 times, repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264).
GOOD_EPOCHS = 4.0


@dataclass(frozen=True)
class Epochs:
    """One source of a corpus.

    Args:
        source: path of the source.
        tokens: tokens in the source, estimated from a sample, or published.
        trained_tokens: tokens of the source that the whole run trains on.
        is_published: ``tokens`` is from ``data.sources``.
    """

    source: str
    tokens: int
    trained_tokens: int
    is_published: bool = False

    @property
    def count(self) -> float:
        """How often the run trains on the source."""
        return self.trained_tokens / self.tokens

    @property
    def warning(self) -> str:
        """A warning if the source is repeated too often; else empty."""
        if self.count <= GOOD_EPOCHS:
            return ""
        return (
            f"data: the run trains on {self.source} about {self.count:.0f} times: {self.trained_tokens:,} tokens from "
            f"a corpus of about {self.tokens:,}; repeats beyond {GOOD_EPOCHS:.0f} add little (arXiv 2305.16264)"
        )


def epochs(config: Config, dataset: Mapping[str, Any]) -> list[Epochs]:
    """Return the epochs of each source; empty if the tokens of a source are unknown.

    Args:
        dataset: content of ``dataset.json``; empty: not prepared, then ``data.sources`` may have the tokens.
    """
    published = [{"path": s.path, "estimated_tokens": s.tokens} for s in config.data.sources]
    sources = dataset["sources"] if dataset.get("sources") else published
    trained = source_tokens(config, config.total_tokens)
    if len(trained) != len(sources) or not all(source.get("estimated_tokens") for source in sources):
        return []
    return [
        Epochs(source["path"], source["estimated_tokens"], round(tokens), sources is published)
        for source, tokens in zip(sources, trained, strict=True)
    ]


#: With no failure in a time T, the mean time between failures is above T / ln(1 / 0.05) with this confidence.
CONFIDENCE = 0.95


def young_s(save_s: float, mean_time_between_failures_s: float) -> float:
    """Return the first-order optimum, sqrt(2 C M) (Young 1974, Communications of the ACM 17(9))."""
    return math.sqrt(2 * save_s * mean_time_between_failures_s)


def daly_s(save_s: float, mean_time_between_failures_s: float) -> float:
    """Return the higher-order optimum, which also holds if saves are not much shorter than the time between failures.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C, and M if C is 2 M or more (Daly 2006, Future Generation
    Computer Systems 22(3)).
    """
    if save_s >= 2 * mean_time_between_failures_s:
        return mean_time_between_failures_s
    ratio = save_s / (2 * mean_time_between_failures_s)
    return young_s(save_s, mean_time_between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def least_time_between_failures_s(without_failure_s: float) -> float:
    """Return the 95 % lower bound of the mean time between failures after this time without a failure."""
    return without_failure_s / -math.log(1 - CONFIDENCE)
