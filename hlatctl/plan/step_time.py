"""Time of an optimizer step and model FLOPs utilisation: a roofline with communication; pure arithmetic.

Large products run at a share of the peak, collectives at a share of the links' bandwidth (``cluster.hardware``, both
calibrated). Only FSDP's collectives overlap computation. If the hardware is unknown, there is no step time: nothing is
guessed. ``hlatctl.plan.products`` has the operations of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, HardwareConfig
from conf.sizes import (
    COMPUTE_BYTES,
    FP32_BYTES,
    flops_per_token,
    layer_parameters,
    process_layers,
    stage_parameters,
    state_bytes,
)
from hlatctl.plan.execution import OURS, Execution
from hlatctl.plan.products import Device, head_product, layer_passes, layer_products, loss_s

#: Collectives of a layer: into and out of attention and feed-forward, forward and backward.
_EXCHANGES_PER_LAYER = 8
_FORWARD_EXCHANGES = 4
#: What asynchronous tensor parallelism leaves visible of them: about what torchtitan's pairs of runs show.
ASYNCHRONOUS_EXPOSED_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of an optimizer step's time, and the share of the hardware's peak that it reaches.

    Args:
        compute_s: products, including recomputation.
        elementwise_s: norms, rotations, activations and the loss, including recomputation.
        tensor_parallel_s: collectives within layers.
        pipeline_s: stages that wait for others, and transfers between stages.
        data_parallel_s: gradients and shards of weights over the replicas.
        optimizer_s: reading and writing weights, gradients and moments.
        mfu_fraction: model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B).
    """

    compute_s: float
    elementwise_s: float
    tensor_parallel_s: float
    pipeline_s: float
    data_parallel_s: float
    optimizer_s: float
    mfu_fraction: float

    @property
    def total_s(self) -> float:
        """One optimizer step."""
        visible_s = self.tensor_parallel_s + self.pipeline_s + self.data_parallel_s
        return self.compute_s + self.elementwise_s + visible_s + self.optimizer_s


def step_time_s(config: Config) -> float | None:
    """Return the seconds of an optimizer step; None if a value of ``cluster.hardware`` is missing."""
    time = step_time(config)
    return None if time is None else time.total_s


def peak_flops_per_s(config: Config) -> float | None:
    """Return the peak of all processes together, in the precision of the products; None if unknown."""
    hardware = config.cluster.hardware
    one = hardware.fp32_flops_per_s if config.precision.name == "fp32" else hardware.bf16_flops_per_s
    return None if one is None else one * config.world_size


def missing(config: Config) -> list[str]:
    """Return the keys that a step time needs and that are not set."""
    hardware = config.cluster.hardware
    several = config.world_size > 1
    needed = {
        "fp32_flops_per_s" if config.precision.name == "fp32" else "bf16_flops_per_s": True,
        "link_bytes_per_s": several and config.cluster.processes_per_node > 1,
        "network_bytes_per_s": several and config.cluster.nodes > 1,
    }
    return [f"cluster.hardware.{key}" for key, asked in needed.items() if asked and getattr(hardware, key) is None]


def step_time(config: Config, execution: Execution = OURS) -> StepTime | None:
    """Return the parts of a step's time; None if a value of ``cluster.hardware`` is missing.

    The slowest pipeline stage sets the pace of a micro-batch. With m micro-batches, p stages and v chunks of each the
    pipeline takes (m + (p - 1) / v) of them (arXiv 2104.04473, sections 2.2.1 and 2.2.2).
    """
    if missing(config):
        return None
    peak = peak_flops_per_s(config)
    assert peak is not None
    micro_batches, stages = config.grad_accum_steps, config.parallel.pipeline_parallel_size
    pace = max((_pace(config, execution, stage) for stage in {0, stages - 1}), key=lambda pace: pace.total_s)
    send_s = _send_s(config) + (config.cluster.hardware.pipeline_overhead_s if stages > 1 else 0.0)
    bubble = (stages - 1) / execution.chunks
    pipeline_s = bubble * (pace.total_s + send_s) + execution.chunks * micro_batches * send_s
    data_s, optimizer_s = _data_parallel_s(config, micro_batches * pace.total_s), _optimizer_s(config)
    total_s = micro_batches * pace.total_s + pipeline_s + data_s + optimizer_s
    model_flops = flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return StepTime(
        compute_s=micro_batches * pace.products_s,
        elementwise_s=micro_batches * pace.elementwise_s,
        tensor_parallel_s=micro_batches * pace.exchange_s,
        pipeline_s=pipeline_s,
        data_parallel_s=data_s,
        optimizer_s=optimizer_s,
        mfu_fraction=model_flops / (total_s * peak),
    )


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """Seconds of one micro-batch in one process of a stage."""

    products_s: float
    elementwise_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return self.products_s + self.elementwise_s + self.exchange_s


def _pace(config: Config, execution: Execution, stage: int) -> _Pace:
    layers = len(process_layers(config, stage))
    peak = peak_flops_per_s(config)
    assert peak is not None
    device = Device.of(config, peak / config.world_size)
    products_s = layers * layer_products(config, execution, device).total_s
    elementwise_s = layers * layer_passes(config, execution, device).total_s
    if stage == config.parallel.pipeline_parallel_size - 1:
        products_s += head_product(config, device).total_s
        elementwise_s += loss_s(config, device)
    return _Pace(products_s=products_s, elementwise_s=elementwise_s, exchange_s=layers * _exchange_s(config, execution))


def _exchange_s(config: Config, execution: Execution) -> float:
    """Return the time of one layer's collectives: four all-reduces, or the same volume in gathers and scatters.

    A ring sends (t - 1) / t of the tensor for each half of an all-reduce (arXiv 2205.05198, section 4.2.2: sequence
    parallelism sends as much).
    """
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return 0.0
    again = _FORWARD_EXCHANGES if config.parallel.activation_checkpointing == "full" else 0
    again = _FORWARD_EXCHANGES // 2 if execution.recomputes_half else again
    tokens = config.micro_batch_size * config.train.seq_len
    one = (size - 1) / size * tokens * config.model.hidden_size * COMPUTE_BYTES[config.precision.name]
    within = size <= config.cluster.processes_per_node
    rate = _link(config.cluster.hardware) if within else _share_of_network(config)
    exposed = ASYNCHRONOUS_EXPOSED_FRACTION if execution.asynchronous_tensor_parallel else 1.0
    return exposed * (_EXCHANGES_PER_LAYER + again) * one / rate


def _send_s(config: Config) -> float:
    """Return the time to send a micro-batch's activations to the next stage, and its gradients back."""
    if config.parallel.pipeline_parallel_size == 1:
        return 0.0
    parallel = config.parallel
    tokens = config.micro_batch_size * config.train.seq_len
    cut = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    sent = 2 * tokens * config.model.hidden_size * COMPUTE_BYTES[config.precision.name] / cut
    # Stages are the outermost dimension of the ranks, so a stage's successor is on another node if there is one.
    rate = _link(config.cluster.hardware) if config.cluster.nodes == 1 else _share_of_network(config)
    return sent / rate


def _data_parallel_s(config: Config, compute_s: float) -> float:
    """Return the time of the rings over the replicas that nothing else hides.

    Each half of an all-reduce sends (n - 1) / n of what a process has. ZeRO-1 scatters gradients and gathers weights
    (arXiv 1910.02054, section 7), after the backward pass. ZeRO-3 gathers the weights for each forward and backward
    pass and scatters the gradients after the latter. FSDP does so while another layer computes: only the ends of the
    model and one layer can't overlap (arXiv 2304.11277, section 3.3). With pipeline stages it keeps gathered weights
    for the whole step.
    """
    replicas = config.data_parallel_size
    if replicas == 1:
        return 0.0
    each, compute, parallel = state_bytes(config), COMPUTE_BYTES[config.precision.name], config.parallel
    if parallel.data_parallel != "fsdp":
        per_parameter = {"replicate": 2 * each.gradients, "zero1": each.gradients + each.weights}[
            parallel.data_parallel
        ]
        return _ring_s(config, per_parameter * _largest_stage(config))
    piped = parallel.pipeline_parallel_size > 1
    gathers, scatters = (1, 1) if piped else (2 * config.grad_accum_steps, config.grad_accum_steps)
    whole_s = _ring_s(config, (gathers * compute + scatters * FP32_BYTES) * _largest_stage(config))
    if piped:
        return whole_s
    first = _largest_stage(config) - (config.model.num_layers - 1) * layer_parameters(config)
    return max(whole_s - compute_s, _ring_s(config, (compute + FP32_BYTES) * first))


def _largest_stage(config: Config) -> int:
    return max(stage_parameters(config, stage) for stage in {0, config.parallel.pipeline_parallel_size - 1})


def _ring_s(config: Config, held_bytes: float) -> float:
    """Return the time of one half of an all-reduce of what each replica has.

    A ring that goes node by node leaves each node once. The rings of all replica groups on a node share its network.
    """
    replicas, cluster = config.data_parallel_size, config.cluster
    sent = (replicas - 1) / replicas * held_bytes
    together = min(replicas, max(1, cluster.processes_per_node // config.parallel.tensor_parallel_size))
    slowest = [sent / _link(cluster.hardware)] if together > 1 else []
    if replicas > together:
        slowest.append(sent * (cluster.processes_per_node / together) / _network(cluster.hardware))
    return max(slowest)


def _optimizer_s(config: Config) -> float:
    """Return the time to read and write the state once; 0 if the memory's bandwidth is unknown."""
    rate = config.cluster.hardware.memory_bytes_per_s
    if rate is None:
        return 0.0
    each = state_bytes(config)
    held = stage_parameters(config, 0) / (
        1 if config.parallel.data_parallel == "replicate" else config.data_parallel_size
    )
    return 2 * held * (each.weights + each.gradients + each.master + each.moments) / rate


def _link(hardware: HardwareConfig) -> float:
    assert hardware.link_bytes_per_s is not None
    return hardware.link_bytes_per_s * hardware.collective_efficiency


def _network(hardware: HardwareConfig) -> float:
    assert hardware.network_bytes_per_s is not None
    return hardware.network_bytes_per_s * hardware.collective_efficiency


def _share_of_network(config: Config) -> float:
    """Return one process's part of its node's network when all send at once."""
    return _network(config.cluster.hardware) / config.cluster.processes_per_node
