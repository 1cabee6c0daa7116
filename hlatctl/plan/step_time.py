"""Time of an optimizer step and model FLOPs utilisation: a roofline with communication; pure arithmetic.

Large products run at a share of the peak, collectives at a share of the links' bandwidth (``cluster.hardware``, both
calibrated). If the hardware is unknown, there is no step time: nothing is guessed. ``hlatctl.plan.products`` has the
operations of one device, ``collectives`` those of groups, ``overlap`` what of those over replicas is visible.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config
from conf.sizes import flops_per_token, process_layers
from hlatctl.plan.collectives import context_parallel_work, send_s, tensor_parallel_work
from hlatctl.plan.execution import Execution, micro_batches
from hlatctl.plan.optimizer import update_s
from hlatctl.plan.overlap import visible_s
from hlatctl.plan.products import Device, Work, head_product, layer_passes, layer_products, loss_work


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of an optimizer step's time, and the share of the hardware's peak that it reaches.

    Args:
        compute_s: products, including recomputation.
        elementwise_s: norms, rotations, activations and the loss, including recomputation.
        tensor_parallel_s: collectives within layers.
        context_parallel_s: keys, values and their gradients.
        pipeline_s: stages that wait for others, and transfers between stages.
        data_parallel_s: gradients and shards of weights over the replicas.
        optimizer_s: reading and writing weights, gradients and moments.
        mfu_fraction: model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B).
    """

    compute_s: float
    elementwise_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    pipeline_s: float
    data_parallel_s: float
    optimizer_s: float
    mfu_fraction: float

    @property
    def total_s(self) -> float:
        """One optimizer step."""
        within_s = self.compute_s + self.elementwise_s + self.tensor_parallel_s + self.context_parallel_s
        return within_s + self.pipeline_s + self.data_parallel_s + self.optimizer_s


def step_time_s(config: Config) -> float | None:
    """Return the seconds of an optimizer step; None if a value of ``cluster.hardware`` is missing."""
    time = step_time(config)
    return None if time is None else time.total_s


def peak_flops_per_s(config: Config) -> float | None:
    """Return the peak of all processes together, which MFU refers to; None if unknown. With FP8 it is that of BF16."""
    hardware = config.cluster.hardware
    one = hardware.fp32_flops_per_s if config.precision.name == "fp32" else hardware.bf16_flops_per_s
    return None if one is None else one * config.world_size


def missing(config: Config, execution: Execution | None = None) -> list[str]:
    """Return the keys that a step time needs and that are not set."""
    hardware = config.cluster.hardware
    several = config.world_size > 1
    needed = {
        "fp32_flops_per_s" if config.precision.name == "fp32" else "bf16_flops_per_s": True,
        "fp8_flops_per_s": (execution or Execution.of(config)).fp8 is not None,
        "link_bytes_per_s": several and config.cluster.processes_per_node > 1,
        "network_bytes_per_s": several and config.cluster.nodes > 1,
    }
    return [f"cluster.hardware.{key}" for key, asked in needed.items() if asked and getattr(hardware, key) is None]


def step_time(config: Config, execution: Execution | None = None) -> StepTime | None:
    """Return the parts of a step's time; None if a value of ``cluster.hardware`` is missing.

    The slowest pipeline stage sets the pace of a micro-batch.

    Args:
        config: of the run.
        execution: of other software; None: what the configuration says.
    """
    how = execution or Execution.of(config)
    if missing(config, how):
        return None
    peak = peak_flops_per_s(config)
    assert peak is not None
    count, stages = micro_batches(config, how), config.parallel.pipeline_parallel_size
    pace = max((_pace(config, how, stage) for stage in {0, stages - 1}), key=lambda pace: pace.total_s)
    pipeline_s = _pipeline_s(config, how, pace, count)
    data_s = visible_s(config, how, pace.layer, pace.backward_s)
    optimizer_s = update_s(config, how, _device(config))
    total_s = count * pace.total_s + pipeline_s + data_s + optimizer_s
    model_flops = flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return StepTime(
        compute_s=count * pace.products_s,
        elementwise_s=count * pace.elementwise_s,
        tensor_parallel_s=count * pace.tensor_parallel_s,
        context_parallel_s=count * pace.context_parallel_s,
        pipeline_s=pipeline_s,
        data_parallel_s=data_s,
        optimizer_s=optimizer_s,
        mfu_fraction=model_flops / (total_s * peak),
    )


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """Seconds of one micro-batch in one process of a stage, and of one of its layers."""

    products_s: float
    elementwise_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    backward_s: float
    layer: Work

    @property
    def total_s(self) -> float:
        return self.products_s + self.elementwise_s + self.tensor_parallel_s + self.context_parallel_s


def _pace(config: Config, execution: Execution, stage: int) -> _Pace:
    layers = len(process_layers(config, stage))
    device = _device(config)
    products, passes = layer_products(config, execution, device), layer_passes(config, execution, device)
    tensor, context = tensor_parallel_work(config, execution), context_parallel_work(config, execution)
    layer = products + passes + tensor + context
    head, loss = Work(0.0, 0.0), Work(0.0, 0.0)
    if stage == config.parallel.pipeline_parallel_size - 1:
        head, loss = head_product(config, execution, device), loss_work(config, execution, device)
    return _Pace(
        products_s=layers * products.total_s + head.total_s,
        elementwise_s=layers * passes.total_s + loss.total_s,
        tensor_parallel_s=layers * tensor.total_s,
        context_parallel_s=layers * context.total_s,
        backward_s=layers * (layer.backward_s + layer.again_s) + head.backward_s + loss.backward_s,
        layer=layer,
    )


def _device(config: Config) -> Device:
    peak = peak_flops_per_s(config)
    assert peak is not None
    return Device.of(config, peak / config.world_size)


def _pipeline_s(config: Config, execution: Execution, pace: _Pace, count: int) -> float:
    """Return the time of waiting for other stages, and of transfers between stages.

    With m micro-batches, p stages and v chunks of each, the pipeline takes (m + (p - 1) / v) of them (arXiv 2104.04473,
    sections 2.2.1 and 2.2.2).
    """
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return 0.0
    one_s = send_s(config, execution) + config.cluster.hardware.pipeline_overhead_s
    wait_s = (stages - 1) / execution.chunks * (pace.total_s + one_s)
    return wait_s + execution.chunks * count * one_s
