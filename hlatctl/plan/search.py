"""The layouts of a model that fit its devices, cheapest first; pure arithmetic."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args, get_type_hints

from conf.schema import Config, ParallelConfig, PrecisionName
from conf.validate import unsupported, validate
from hlatctl.plan.memory import Memory, memory
from hlatctl.plan.step_time import StepTime, missing, step_time
from hlatctl.run.errors import ConfigError

#: Levels of recomputation; a budget has no natural values to try.
CHECKPOINTING = tuple(
    level for level in get_args(get_type_hints(ParallelConfig)["activation_checkpointing"]) if level != "budget"
)
#: Number formats that are known to converge (HLAT, arXiv 2404.10630, section 3.3); plain BF16 diverged.
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "mixed", "bf16_sr")
_DATA_PARALLEL = {"torch_native": ("replicate", "zero1", "fsdp"), "nxd": ("replicate", "zero1")}
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    config: Config
    memory: Memory
    time: StepTime


def search(config: Config, count: int = 10) -> list[Candidate]:
    """Return the layouts of this model and global batch on these nodes, cheapest first.

    Tensor and pipeline parallelism, data parallelism, recomputation, accumulation and precision vary. On given nodes
    the cheapest step is the shortest; of equally fast ones the one that leaves more memory comes first.

    Raises:
        ConfigError: a value of ``cluster.hardware`` that the ranking needs is not set.
    """
    lacking = missing(config)
    if config.cluster.hardware.memory_bytes is None:
        lacking.append("cluster.hardware.memory_bytes")
    if lacking:
        raise ConfigError(
            f"{lacking[0]}=null: a ranking needs it",
            hint="set it, or use a cluster whose hardware is known: cluster=trn1_32xlarge",
        )
    ranked = heapq.merge(*(_fitting(config, precision) for precision in _PRECISIONS), key=_rank)
    valid = (candidate for candidate in ranked if is_valid(candidate.config))
    return list(itertools.islice(valid, count))


def is_valid(config: Config, *, to_train: bool = True) -> bool:
    """Return whether the configuration breaks no rule, and its backend can train the layout.

    Args:
        config: to check.
        to_train: whether the backend matters.
    """
    try:
        validate(config, to_start=False)
    except ConfigError:
        return False
    return not (to_train and unsupported(config))


def changed(config: Config, **layout: object) -> Config:
    """Return the configuration with other values of ``parallel.*``."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **layout))  # type: ignore[arg-type]


def _rank(candidate: Candidate) -> tuple[float, int]:
    return candidate.time.total_s, candidate.memory.need_bytes


def _fitting(config: Config, precision: PrecisionName) -> list[Candidate]:
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, name=precision))
    if missing(config):
        return []
    return sorted((best for layout in _layouts(config) if (best := _best_accumulation(layout))), key=_rank)


def _best_accumulation(layout: Config) -> Candidate | None:
    """Return the fastest micro batch of a layout; of equally fast ones the one that needs least memory."""
    share, fitting = layout.train.global_batch_size // layout.data_parallel_size, []
    for size in (size for size in _MICRO_BATCHES if share % size == 0):
        candidate = with_micro_batch(layout, size)
        need = memory(candidate)
        if need.fits:
            time = step_time(candidate)
            assert time is not None
            fitting.append(Candidate(candidate, need, time))
    return min(fitting, key=_rank, default=None)


def _layouts(config: Config) -> Iterator[Config]:
    world, batch = config.world_size, config.train.global_batch_size
    sizes = config.cluster.hardware.tensor_parallel_sizes or _divisors(config.cluster.processes_per_node)
    for tensor, stages in itertools.product(sizes, _divisors(config.model.num_layers)):
        if world % (tensor * stages) or batch % (world // (tensor * stages)):
            continue
        for data_parallel in _DATA_PARALLEL[config.backend.name]:
            for checkpointing in CHECKPOINTING:
                yield changed(
                    config,
                    tensor_parallel_size=tensor,
                    sequence_parallel=tensor > 1,
                    pipeline_parallel_size=stages,
                    data_parallel=data_parallel,
                    activation_checkpointing=checkpointing,
                )


def with_micro_batch(config: Config, size: int) -> Config:
    """Return the configuration with another micro batch."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
