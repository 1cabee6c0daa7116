"""Device memory that one process needs, by part; pure arithmetic.

``hlatctl.plan.activations`` has what depends on the tokens of a micro-batch. ``tests/trainer/test_planned_memory.py``
compares the result with what PyTorch's allocator gives out.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config
from conf.sizes import (
    BF16_BYTES,
    COMPUTE_BYTES,
    FP32_BYTES,
    layer_parameters,
    stage_layers,
    stage_parameters,
    state_bytes,
)
from hlatctl.plan.activations import activation_bytes, widths, work
from hlatctl.plan.execution import Execution, micro_batches, shards, shards_weights
from hlatctl.run.errors import ConfigError
from hlatctl.units import size

#: FP32 tensors of a parameter's size in the BF16 optimizer's update of it (trainer.optim).
_UPDATE_TENSORS = 7


@dataclass(frozen=True)
class Part:
    """A part of the peak memory; ``kind`` is ``derived`` or ``calibrated``."""

    name: str
    value_bytes: int
    kind: str = "derived"


@dataclass(frozen=True)
class Memory:
    """The need of the process that needs most, and the memory of its device (None: unknown)."""

    parts: list[Part]
    device_bytes: int | None

    @property
    def need_bytes(self) -> int:
        """The sum of all parts."""
        return sum(part.value_bytes for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory; None if its memory is unknown."""
        return None if self.device_bytes is None else self.need_bytes <= self.device_bytes


def memory(config: Config, execution: Execution | None = None) -> Memory:
    """Return the peak of the process that needs most: in the first pipeline stage or the last one.

    Args:
        config: of the run.
        execution: of other software; None: what the configuration says.
    """
    how, stages = execution or Execution.of(config), {0, config.parallel.pipeline_parallel_size - 1}
    needs = (Memory(_parts(config, how, stage), config.cluster.hardware.memory_bytes) for stage in sorted(stages))
    return max(needs, key=lambda need: need.need_bytes)


def check_memory(config: Config) -> None:
    """Refuse a run that does not fit its devices' memory, if that is known.

    Raises:
        ConfigError: names the device's memory and the need.
    """
    need = memory(config)
    if need.fits is False:
        largest = max((part for part in need.parts if part.kind == "derived"), key=lambda part: part.value_bytes)
        raise ConfigError(
            f"cluster.hardware.memory_bytes={need.device_bytes} ({size(need.device_bytes or 0)}): a process needs "
            f"{size(need.need_bytes)}, of which {largest.name} {size(largest.value_bytes)}",
            hint="`hlatctl plan` with the same overrides shows the parts, and which changes would make it fit",
        )


def _parts(config: Config, execution: Execution, stage: int) -> list[Part]:
    held, each = stage_parameters(config, stage), state_bytes(config)
    sharing = shards(config, execution)
    weight_shards = sharing if shards_weights(config, execution) else 1
    own_gradients = each.own_gradients * held // weight_shards
    # They are allocated while activations are freed: both exist at once only from the second micro-batch on.
    early = own_gradients if micro_batches(config, execution) > 1 else 0
    update = own_gradients - early + _update(config, stage, weight_shards)
    activations = activation_bytes(config, execution, len(stage_layers(config, stage)), stage)
    temporary, temporary_bytes = work(config, execution, stage)
    moments = moment_bytes(config, execution, stage) // sharing
    parts = [
        Part("weights", each.weights * held // weight_shards),
        Part("gradients", each.gradients * held // weight_shards + early),
        Part("master weights", each.master * held // sharing),
        Part("moments", moments),
        Part("gathered weights", _gathered(config, execution, stage)),
        Part("whole gradients", _whole_gradients(config, execution, stage)),
        Part("activations", activations),
        Part(temporary, temporary_bytes),
        Part("the optimizer's update", max(0, update - activations - temporary_bytes)),
        Part("copy of a checkpoint", _checkpoint_copy(config, held // weight_shards, moments)),
        Part("workspace", config.cluster.hardware.workspace_bytes, "calibrated"),
    ]
    return [part for part in parts if part.value_bytes]


def moment_bytes(config: Config, execution: Execution, stage: int) -> int:
    """Return the bytes of a stage's moments. Muon has one of a layer's matrices, AdamW two of everything."""
    whole = state_bytes(config).moments * stage_parameters(config, stage)
    if not execution.muon_steps:
        return whole
    return whole - state_bytes(config).moments // 2 * matrix_parameters(config, stage)


def matrix_parameters(config: Config, stage: int) -> int:
    """Return one process's parameters of a stage in the matrices of layers: without norms, embedding and head."""
    (width, kv, ffn, _), hidden = widths(config), config.model.hidden_size
    return len(stage_layers(config, stage)) * hidden * (2 * width + 2 * kv + 3 * ffn)


def _gathered(config: Config, execution: Execution, stage: int) -> int:
    """Return what FSDP gathers at a time: two layers, embedding and head (arXiv 2304.11277, section 3.2).

    The whole stage where weights are kept for the step: by ZeRO-1, without resharding, and in pipelines.
    """
    if not shards_weights(config, execution):
        return 0
    layers = len(stage_layers(config, stage)) * layer_parameters(config)
    ends = stage_parameters(config, stage) - layers
    if not keeps_gathered(config, execution):
        layers = 2 * layer_parameters(config)
    return COMPUTE_BYTES[config.precision.name] * ends + int(layer_weight_bytes(config, execution) * layers)


def keeps_gathered(config: Config, execution: Execution) -> bool:
    """Return whether gathered weights are kept for the whole step."""
    parallel = config.parallel
    return not execution.reshards or parallel.data_parallel == "zero1" or parallel.pipeline_parallel_size > 1


def layer_weight_bytes(config: Config, execution: Execution) -> int:
    """Return the bytes of a gathered weight of a layer: one in FP8 if all shards know the scale (tensorwise)."""
    return 1 if execution.fp8 == "tensorwise" else COMPUTE_BYTES[config.precision.name]


def _whole_gradients(config: Config, execution: Execution, stage: int) -> int:
    """Return the FP32 gradients that FSDP2 accumulates before it scatters them.

    ZeRO-1 scatters them in the last micro-batch, and a pipeline after it.
    """
    if not shards_weights(config, execution) or micro_batches(config, execution) == 1:
        return 0
    is_late = config.parallel.data_parallel == "zero1" or config.parallel.pipeline_parallel_size > 1
    return FP32_BYTES * stage_parameters(config, stage) if is_late else 0


def _update(config: Config, stage: int, weight_shards: int) -> int:
    """Return the FP32 tensors of the BF16 optimizer, which updates one parameter at a time."""
    if config.backend.name == "nxd" or state_bytes(config).weights != BF16_BYTES:
        return 0
    return _UPDATE_TENSORS * FP32_BYTES * _largest(config, stage) // weight_shards


def _largest(config: Config, stage: int) -> int:
    ends = {0, config.parallel.pipeline_parallel_size - 1}
    width, kv, ffn, _ = widths(config)
    vocabulary = config.model.vocab_size // config.parallel.tensor_parallel_size if stage in ends else 0
    return max(2 * ffn, width + 2 * kv, vocabulary) * config.model.hidden_size


def _checkpoint_copy(config: Config, held: int, moments: int) -> int:
    """Return the copy that is written while training continues; on a CPU, host memory is the device's memory."""
    if config.backend.device != "cpu" or config.checkpoint.mode != "async":
        return 0
    each = state_bytes(config)
    return (each.master or each.weights) * held + moments
