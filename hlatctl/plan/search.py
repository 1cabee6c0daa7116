"""The layouts of a model that fit its devices, cheapest first, and changes that make a run fit; pure arithmetic."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from conf.schema import Config, ParallelConfig, PrecisionName
from conf.sizes import has_shape
from conf.validate import unsupported, validate
from hlatctl.plan.budget import cost
from hlatctl.plan.memory import Memory, memory
from hlatctl.plan.step_time import StepTime, missing, step_time
from hlatctl.run.errors import ConfigError
from hlatctl.units import seconds, size

#: Levels of recomputation; a budget has no natural values to try.
CHECKPOINTING = tuple(
    level for level in get_args(get_type_hints(ParallelConfig)["activation_checkpointing"]) if level != "budget"
)
#: Number formats that are known to converge (HLAT, arXiv 2404.10630, section 3.3); plain BF16 diverged.
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "mixed", "bf16_sr")
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    config: Config
    memory: Memory
    time: StepTime


def search(config: Config, count: int = 10) -> list[Candidate]:
    """Return the layouts of this model and global batch on these nodes, cheapest first.

    Tensor, pipeline, expert and data parallelism, recomputation, accumulation and precision vary. On given nodes the
    cheapest step is the shortest; of equally fast ones the one that leaves more memory comes first.

    Raises:
        ConfigError: a value of ``cluster.hardware`` that the ranking needs is not set, or the model's shape is unknown.
    """
    if not has_shape(config.model):
        raise ConfigError(
            f"model.module={config.model.module}: a ranking needs the model's shape",
            hint="set model.hidden_size, model.num_layers and the other keys of the shape",
        )
    lacking = missing(config)
    if config.cluster.hardware.memory_bytes is None:
        lacking.append("cluster.hardware.memory_bytes")
    if lacking:
        raise ConfigError(
            f"{lacking[0]}=null: a ranking needs it",
            hint="set it, or use a cluster whose hardware is known: cluster=trn1_32xlarge",
        )
    trained = [precision for precision in _PRECISIONS if precision in config.backend.kind.state_bytes]
    ranked = heapq.merge(*(_fitting(config, precision) for precision in trained), key=_rank)
    valid = (candidate for candidate in ranked if is_valid(candidate.config))
    return list(itertools.islice(valid, count))


def is_valid(config: Config, *, to_train: bool = True) -> bool:
    """Return whether the configuration breaks no rule, and its backend can train the layout.

    Args:
        to_train: also require that the backend can train the layout.
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
    if precision not in config.backend.kind.state_bytes or missing(config):
        return []
    return sorted((best for layout in _layouts(config) if (best := _best_accumulation(layout))), key=_rank)


def _best_accumulation(layout: Config) -> Candidate | None:
    share, fitting = layout.train.global_batch_size // layout.data_parallel_size, []
    for sequences in (number for number in _MICRO_BATCHES if share % number == 0):
        candidate = with_micro_batch(layout, sequences)
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
        expert_sizes = [size for size in _divisors(config.model.num_experts or 1) if world // stages % size == 0]
        for data_parallel, checkpointing, experts in itertools.product(
            config.backend.kind.data_parallel, CHECKPOINTING, expert_sizes
        ):
            yield changed(
                config,
                tensor_parallel_size=tensor,
                sequence_parallel=tensor > 1,
                pipeline_parallel_size=stages,
                data_parallel=data_parallel,
                activation_checkpointing=checkpointing,
                expert_parallel_size=experts,
            )


def with_micro_batch(config: Config, size: int) -> Config:
    """Return the configuration with another micro batch."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


_LAYOUT_COLUMNS = ("TP", "PP", "EP", "DP", "DATA PARALLEL", "RECOMPUTED", "MICRO", "ACCUM", "PRECISION")
_COLUMNS = (*_LAYOUT_COLUMNS, "MEMORY", "STEP", "MFU", "COST")


def search_records(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Return ranked candidates as plain values."""
    return [
        {
            "tensor_parallel_size": candidate.config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": candidate.config.parallel.pipeline_parallel_size,
            "expert_parallel_size": candidate.config.parallel.expert_parallel_size,
            "data_parallel_size": candidate.config.data_parallel_size,
            "data_parallel": candidate.config.parallel.data_parallel,
            "activation_checkpointing": candidate.config.parallel.activation_checkpointing,
            "micro_batch_size": candidate.config.micro_batch_size,
            "grad_accum_steps": candidate.config.grad_accum_steps,
            "precision": candidate.config.precision.name,
            "memory_bytes": candidate.memory.need_bytes,
            "step_s": candidate.time.total_s,
            "mfu_fraction": candidate.time.mfu_fraction,
            "usd": cost(candidate.config, candidate.time.total_s).usd,
        }
        for candidate in candidates
    ]


def search_rows(candidates: list[Candidate]) -> list[list[str]]:
    """Return ranked candidates as rows of cells, with a heading."""
    rows = [list(_COLUMNS)]
    for record in search_records(candidates):
        *layout, memory_bytes, step_s, mfu_fraction, usd = record.values()
        money = "-" if usd is None else f"${usd:,.0f}"
        rows.append([*map(str, layout), size(memory_bytes), seconds(step_s), f"{mfu_fraction:.1%}", money])
    return rows


def remedies(config: Config) -> list[tuple[str, Memory]]:
    """Return the overrides that make a run fit, and the memory that it needs then; the fewest changes first."""
    to_train = not unsupported(config)
    needs = ((text, memory(other)) for text, other in _neighbours(config) if is_valid(other, to_train=to_train))
    return sorted(((text, need) for text, need in needs if need.fits), key=lambda remedy: len(remedy[0].split()))


def _neighbours(config: Config) -> Iterator[tuple[str, Config]]:
    yield from _smaller_micro_batches(config)
    yield from _recomputing(config)
    *less_sharded, sharded = config.backend.kind.data_parallel
    if config.parallel.data_parallel in less_sharded:
        yield f"parallel.data_parallel={sharded}", changed(config, data_parallel=sharded)
    if config.parallel.fsdp_size is not None:
        yield "parallel.fsdp_size=null", changed(config, fsdp_size=None)
    if config.parallel.reshard_after_forward == "never":
        yield "parallel.reshard_after_forward=always", changed(config, reshard_after_forward="always")
    if config.precision.name in ("fp32", "mixed"):
        precision = dataclasses.replace(config.precision, name="bf16_sr")
        yield "precision=bf16_sr", dataclasses.replace(config, precision=precision)
    yield from _more_slices(config)
    for factor in (2, 4):
        nodes = config.cluster.nodes * factor
        more = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=nodes))
        yield f"cluster.nodes={nodes}", more
        for text, other in _more_slices(more):
            yield f"cluster.nodes={nodes} {text}", other


def _smaller_micro_batches(config: Config) -> Iterator[tuple[str, Config]]:
    size = config.micro_batch_size // 2
    while size:
        yield f"train.micro_batch_size={size}", with_micro_batch(config, size)
        size //= 2


def _recomputing(config: Config) -> Iterator[tuple[str, Config]]:
    chosen = config.parallel.activation_checkpointing
    for level in CHECKPOINTING[CHECKPOINTING.index(chosen) + 1 :] if chosen in CHECKPOINTING else ("full",):
        yield f"parallel.activation_checkpointing={level}", changed(config, activation_checkpointing=level)


def _more_slices(config: Config) -> Iterator[tuple[str, Config]]:
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        for factor in (2, 4):
            size = getattr(config.parallel, key) * factor
            if key == "tensor_parallel_size" and size > config.cluster.processes_per_node:
                continue
            yield f"parallel.{key}={size}", changed(config, **{key: size})
