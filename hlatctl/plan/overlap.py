"""What of the collectives over replicas no computation hides; pure arithmetic."""

from __future__ import annotations

from conf.schema import Config
from conf.sizes import COMPUTE_BYTES, FP32_BYTES, layer_parameters, process_layers, stage_parameters, state_bytes
from hlatctl.plan.collectives import OVERLAP_SLOWDOWN_FRACTION, Exchange, ring
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
        return _ring(config, execution, (each.gradients + each.weights) * held, 2).total_s
    whole = _ring(config, execution, 2 * each.gradients * held, 2 * max(1.0, held / BUCKET_ENTRIES))
    if config.backend.name == "nxd":
        return whole.total_s
    # A bucket is exchanged as soon as the last backward pass has filled it; nothing hides the one with the embedding
    # (arXiv 2006.15704, section 3.2.3).
    last = min(held, max(BUCKET_ENTRIES, stage_parameters(config, 0) - _layers(config) * layer_parameters(config)))
    alone = _ring(config, execution, 2 * each.gradients * last, 2)
    slowed_s = OVERLAP_SLOWDOWN_FRACTION * (whole.slowing_s - alone.slowing_s)
    return max(whole.beside_s(backward_s), alone.total_s + slowed_s)


def _sharded_s(config: Config, execution: Execution, layer: Work) -> float:
    """Return what FSDP's prefetching leaves visible.

    The weights of the next layer are gathered while a layer computes, and the gradients of the one before are
    scattered: visible is by how much that takes longer than the computation, and by how much it slows it. Nothing hides
    the collectives at the ends: of the embedding, the output projection and one layer (arXiv 2304.11277, section 3.3).
    The pipelines of PyTorch scatter all gradients after the last micro-batch.
    """
    layers, count = _layers(config), micro_batches(config, execution)
    ends = _largest_stage(config) - layers * layer_parameters(config)
    gather = _gather(config, execution, layer_weight_bytes(config, execution) * layer_parameters(config))
    gather_ends = _gather(config, execution, COMPUTE_BYTES[config.precision.name] * ends)
    scatter = _scatter(config, execution, layer_parameters(config))
    scatter_s, scatter_ends_s = scatter.total_s, _scatter(config, execution, ends).total_s
    forward_s = gather_ends.total_s + gather.total_s + (layers - 1) * gather.beside_s(layer.forward_s)
    if config.parallel.pipeline_parallel_size > 1:
        return forward_s + layers * scatter_s + scatter_ends_s
    kept = keeps_gathered(config, execution)
    in_backward = scatter if kept else scatter + gather
    beside_s = (layers - 1) * in_backward.beside_s(layer.backward_s + layer.again_s)
    backwards = 1 if config.parallel.data_parallel == "zero1" else count
    return (1 if kept else count) * forward_s + backwards * (beside_s + scatter_s + scatter_ends_s)


def _gather(config: Config, execution: Execution, held_bytes: float) -> Exchange:
    return ring(config, held_bytes, shards(config, execution), config.parallel.tensor_parallel_size)


def _scatter(config: Config, execution: Execution, parameters: float) -> Exchange:
    """Return the scatter of FP32 gradients; with hybrid sharding also the sum of the shards over the copies."""
    sharing, stride = shards(config, execution), config.parallel.tensor_parallel_size
    copies = reducers(config, execution) // sharing
    summed = ring(config, 2 * FP32_BYTES * parameters / sharing, copies, stride * sharing, 2)
    return ring(config, FP32_BYTES * parameters, sharing, stride) + summed


def _ring(config: Config, execution: Execution, held_bytes: float, messages: float) -> Exchange:
    return ring(config, held_bytes, reducers(config, execution), config.parallel.tensor_parallel_size, messages)


def _largest_stage(config: Config) -> int:
    return max(stage_parameters(config, stage) for stage in {0, config.parallel.pipeline_parallel_size - 1})


def _layers(config: Config) -> int:
    """Return the layers of the first stage, which has most."""
    return len(process_layers(config, 0))
