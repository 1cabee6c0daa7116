"""What of the collectives over replicas no computation hides; pure arithmetic."""

from __future__ import annotations

from conf.schema import Config
from conf.sizes import COMPUTE_BYTES, FP32_BYTES, layer_parameters, process_layers, stage_parameters, state_bytes
from hlatctl.plan.collectives import ring_s
from hlatctl.plan.execution import Execution, micro_batches, reducers, shards, shards_weights
from hlatctl.plan.memory import keeps_gathered, layer_weight_bytes
from hlatctl.plan.products import Work

#: Gradients that are exchanged together, at least (Megatron-LM's default, too).
BUCKET_ENTRIES = 40_000_000


def visible_s(config: Config, execution: Execution, layer: Work, backward_s: float) -> float:
    """Return the time of the collectives over replicas that nothing else hides.

    Args:
        config: of the run.
        execution: how it is executed.
        layer: computation of one layer.
        backward_s: of a micro-batch, in the slowest stage.
    """
    if reducers(config, execution) == 1:
        return 0.0
    if shards_weights(config, execution):
        return _sharded_s(config, execution, layer)
    each, held = state_bytes(config), _largest_stage(config)
    if config.parallel.data_parallel == "zero1":
        # Gradients are scattered and weights gathered (arXiv 1910.02054, section 7), after the backward pass.
        return _ring(config, execution, (each.gradients + each.weights) * held)
    whole_s = _ring(config, execution, 2 * each.gradients * held)
    if config.backend.name == "nxd":
        return whole_s
    # A bucket is exchanged as soon as the last backward pass has filled it; nothing hides the one with the embedding
    # (arXiv 2006.15704, section 3.2.3).
    last = min(held, max(BUCKET_ENTRIES, stage_parameters(config, 0) - _layers(config) * layer_parameters(config)))
    return max(whole_s - backward_s, _ring(config, execution, 2 * each.gradients * last))


def _sharded_s(config: Config, execution: Execution, layer: Work) -> float:
    """Return what FSDP's prefetching leaves visible.

    The weights of the next layer are gathered while a layer computes, and the gradients of the one before are
    scattered: visible is by how much that takes longer than the computation. Nothing hides the collectives at the ends:
    of the embedding, the output projection and one layer (arXiv 2304.11277, section 3.3). The pipelines of PyTorch
    scatter all gradients after the last micro-batch.
    """
    layers, count = _layers(config), micro_batches(config, execution)
    ends = _largest_stage(config) - layers * layer_parameters(config)
    gather_s = _gather_s(config, execution, layer_weight_bytes(config, execution) * layer_parameters(config))
    gather_ends_s = _gather_s(config, execution, COMPUTE_BYTES[config.precision.name] * ends)
    scatter_s = _scatter_s(config, execution, layer_parameters(config))
    scatter_ends_s = _scatter_s(config, execution, ends)
    forward_s = gather_ends_s + gather_s + (layers - 1) * max(0.0, gather_s - layer.forward_s)
    if config.parallel.pipeline_parallel_size > 1:
        return forward_s + layers * scatter_s + scatter_ends_s
    kept = keeps_gathered(config, execution)
    in_backward_s = scatter_s + (0.0 if kept else gather_s)
    beside_s = (layers - 1) * max(0.0, in_backward_s - layer.backward_s - layer.again_s)
    backwards = 1 if config.parallel.data_parallel == "zero1" else count
    return (1 if kept else count) * forward_s + backwards * (beside_s + scatter_s + scatter_ends_s)


def _gather_s(config: Config, execution: Execution, held_bytes: float) -> float:
    return ring_s(config, held_bytes, shards(config, execution), config.parallel.tensor_parallel_size)


def _scatter_s(config: Config, execution: Execution, parameters: float) -> float:
    """Return the time to scatter FP32 gradients; with hybrid sharding also to sum the shards over the copies."""
    sharing, stride = shards(config, execution), config.parallel.tensor_parallel_size
    copies = reducers(config, execution) // sharing
    summed_s = ring_s(config, 2 * FP32_BYTES * parameters / sharing, copies, stride * sharing)
    return ring_s(config, FP32_BYTES * parameters, sharing, stride) + summed_s


def _ring(config: Config, execution: Execution, held_bytes: float) -> float:
    return ring_s(config, held_bytes, reducers(config, execution), config.parallel.tensor_parallel_size)


def _largest_stage(config: Config) -> int:
    return max(stage_parameters(config, stage) for stage in {0, config.parallel.pipeline_parallel_size - 1})


def _layers(config: Config) -> int:
    """Return the layers of the first stage, which has most."""
    return len(process_layers(config, 0))
