"""Changes that make a run fit its devices: one or two overrides; pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from conf.schema import Config
from conf.validate import unsupported
from hlatctl.plan.memory import Memory, memory
from hlatctl.plan.search import CHECKPOINTING, changed, is_valid, with_micro_batch

_SHARDED = {"torch_native": "fsdp", "nxd": "zero1"}
_LESS_SHARDED = {"torch_native": ("replicate", "zero1"), "nxd": ("replicate",)}


def remedies(config: Config) -> list[tuple[str, Memory]]:
    """Return the overrides that make a run fit, and the memory that it needs then; the fewest changes first."""
    to_train = not unsupported(config)
    needs = ((text, memory(other)) for text, other in _neighbours(config) if is_valid(other, to_train=to_train))
    return sorted(((text, need) for text, need in needs if need.fits), key=lambda remedy: len(remedy[0].split()))


def _neighbours(config: Config) -> Iterator[tuple[str, Config]]:
    yield from _smaller_micro_batches(config)
    yield from _recomputing(config)
    sharded = _SHARDED[config.backend.name]
    if config.parallel.data_parallel in _LESS_SHARDED[config.backend.name]:
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
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        for factor in (2, 4):
            size = getattr(config.parallel, key) * factor
            if key == "tensor_parallel_size" and size > config.cluster.processes_per_node:
                continue
            yield f"parallel.{key}={size}", changed(config, **{key: size})
