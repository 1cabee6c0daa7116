"""Memory that one process needs of its device, by part; pure arithmetic.

What backward passes keep is counted tensor by tensor, as this project's decoder makes them (``trainer.model``); the
test of this file compares it with what the allocator hands out. Nothing here knows how fast a device is.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.devices import DEVICES
from conf.schema import Config, ModelConfig
from conf.sizes import (
    BF16_BYTES,
    COMPUTE_BYTES,
    FP32_BYTES,
    kv_width,
    layer_parameters,
    stage_layers,
    stage_parameters,
    state_bytes,
)
from hlatctl.run.errors import ConfigError
from hlatctl.units import size

#: FP32 tensors of a parameter's size in the BF16 optimizer's update of it (trainer.optim).
_UPDATE_TENSORS = 7


@dataclass(frozen=True)
class Part:
    """A part of the memory at its peak; ``kind`` is ``derived`` or ``calibrated``."""

    name: str
    value_bytes: int
    kind: str = "derived"


@dataclass(frozen=True)
class Memory:
    """What the fullest process needs, and what its device has (None: not known)."""

    parts: list[Part]
    device_bytes: int | None

    @property
    def need_bytes(self) -> int:
        """All parts."""
        return sum(part.value_bytes for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """Whether the device has that much; None if its memory is not known."""
        return None if self.device_bytes is None else self.need_bytes <= self.device_bytes


def memory(config: Config) -> Memory:
    """The peak of the fullest process: of the first pipeline stage or the last one."""
    stages = {0, config.parallel.pipeline_parallel_size - 1}
    found = (Memory(_parts(config, stage), config.cluster.hardware.memory_bytes) for stage in sorted(stages))
    return max(found, key=lambda one: one.need_bytes)


def check_memory(config: Config) -> None:
    """Refuse a run that its devices can't hold.

    Raises:
        ConfigError: names the device's memory and the need. Nothing is said where the device's memory is not known.
    """
    found = memory(config)
    if found.fits is False:
        largest = max((part for part in found.parts if part.kind == "derived"), key=lambda part: part.value_bytes)
        raise ConfigError(
            f"cluster.hardware.memory_bytes={found.device_bytes} ({size(found.device_bytes or 0)}): a process needs "
            f"{size(found.need_bytes)}, of which {largest.name} {size(largest.value_bytes)}",
            hint="`hlatctl plan` with the same overrides shows the parts, and which changes would make it fit",
        )


def _parts(config: Config, stage: int) -> list[Part]:
    held, each = stage_parameters(config, stage), state_bytes(config)
    layout, replicas = config.parallel.data_parallel, config.data_parallel_size
    sharded = replicas if layout == "fsdp" else 1
    optimizer_shards = replicas if layout in ("fsdp", "zero1") else 1
    # FSDP leaves each process's gradients beside the buffer of all.
    own_gradients = (each.weights if layout == "fsdp" else each.own_gradients) * held // sharded
    # They come as the activations go, so that only a second micro-batch meets both.
    early = own_gradients if config.grad_accum_steps > 1 else 0
    update = own_gradients - early + _update(config, stage)
    activations, (work, work_bytes) = _activations(config, stage), _work(config, stage)
    parts = [
        Part("weights", each.weights * held // sharded),
        Part("gradients", each.gradients * held // sharded + early),
        Part("master weights", each.master * held // optimizer_shards),
        Part("moments", each.moments * held // optimizer_shards),
        Part("gathered weights", _gathered(config, stage)),
        Part("activations", activations),
        Part(work, work_bytes),
        Part("the optimizer's update", max(0, update - activations - work_bytes)),
        Part("copy of a checkpoint", _checkpoint_copy(config, held // sharded)),
        Part("workspace", config.cluster.hardware.workspace_bytes, "calibrated"),
    ]
    return [part for part in parts if part.value_bytes]


def _gathered(config: Config, stage: int) -> int:
    """FSDP has two layers and what is outside of layers whole at a time (arXiv 2304.11277, section 3.2)."""
    if config.parallel.data_parallel != "fsdp" or config.data_parallel_size == 1:
        return 0
    ends = stage_parameters(config, stage) - len(stage_layers(config, stage)) * layer_parameters(config)
    return COMPUTE_BYTES[config.precision.name] * (ends + 2 * layer_parameters(config))


def _activations(config: Config, stage: int) -> int:
    """What is kept for the backward passes of the micro-batches that a stage has begun.

    With 1F1B a stage has at most as many in flight as there are stages from it to the last (arXiv 2104.04473,
    section 2.2).
    """
    in_flight = min(config.parallel.pipeline_parallel_size - stage, config.grad_accum_steps)
    kept = _input_bytes(config) if config.parallel.activation_checkpointing == "full" else layer_bytes(config)
    mask = config.micro_batch_size * config.train.seq_len**2 if config.data.mask_across_documents else 0
    return in_flight * len(stage_layers(config, stage)) * kept + mask


def layer_bytes(config: Config) -> int:
    """What one layer keeps of one micro-batch if it is not computed again as a whole.

    As arXiv 2205.05198, section 4, counts it, but for this decoder: per token two norms, the group of query, key and
    value, rotated query and key, the attention's output, and the feed-forward layer's four of its width. A compiled
    layer computes what is cheap again: it keeps no norm's FP32 values, and three of the four.
    """
    width, kv, ffn, compute = _widths(config)
    model, parallel = config.model, config.parallel
    sequence = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    # NxD gathers a product's input again in the backward pass, as section 4.2.2 does; torch_native keeps it.
    inputs = 2 * compute * model.hidden_size // (sequence if config.backend.name == "nxd" else 1)
    core = compute * (2 * width + 3 * kv + width)
    selective = parallel.activation_checkpointing == "selective"
    if _compiles(config):
        core -= compute * (2 * width + kv) if selective else 0
        each = 2 * compute * model.hidden_size // sequence + inputs + core + 3 * compute * ffn
    else:
        core -= compute * (width + kv) if selective else 0
        each = 4 * FP32_BYTES * model.hidden_size // sequence + inputs + core + 4 * compute * ffn
    tokens = config.micro_batch_size * config.train.seq_len
    # BF16 copies of FP32 weights live as long as the activations.
    copies = BF16_BYTES * layer_parameters(config) if _casts_weights(config) else 0
    return tokens * each + copies + (0 if selective else _scores(config))


def _widths(config: Config) -> tuple[int, int, int, int]:
    """One process's width of the query heads, the key heads and the feed-forward layer; bytes of an activation."""
    model, tensor = config.model, config.parallel.tensor_parallel_size
    return (
        model.hidden_size // tensor,
        kv_width(config),
        model.intermediate_size // tensor,
        COMPUTE_BYTES[config.precision.name],
    )


def _scores(config: Config) -> int:
    """Attention's probabilities of a micro-batch, where no fused kernel spares them: HLAT's model on NxD."""
    if config.backend.name != "nxd":
        return 0
    heads = config.model.num_heads // config.parallel.tensor_parallel_size
    return COMPUTE_BYTES[config.precision.name] * config.micro_batch_size * heads * config.train.seq_len**2


def _input_bytes(config: Config) -> int:
    """A layer's input of one micro-batch."""
    sequence = config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1
    tokens = config.micro_batch_size * config.train.seq_len
    return COMPUTE_BYTES[config.precision.name] * tokens * config.model.hidden_size // sequence


def _work(config: Config, stage: int) -> tuple[str, int]:
    """What comes on top for a while: the loss, or one layer's backward pass; the larger one, with its name."""
    backward = _backward(config)
    if stage < config.parallel.pipeline_parallel_size - 1:
        return "a layer's backward pass", backward
    return max(("a layer's backward pass", backward), ("logits and loss", _loss(config)), key=lambda one: one[1])


def _backward(config: Config) -> int:
    width, kv, ffn, compute = _widths(config)
    tokens = config.micro_batch_size * config.train.seq_len
    checkpointing = config.parallel.activation_checkpointing
    gradients = (3 * ffn + 4 * width if _compiles(config) else ffn + 2 * width) * compute * tokens
    if checkpointing == "full":
        return gradients + layer_bytes(config)
    again = compute * tokens * (width + kv) + _scores(config) if checkpointing == "selective" else 0
    return gradients + again + _scores(config)


def _loss(config: Config) -> int:
    """Final norm, logits and their gradients."""
    model, compute = config.model, COMPUTE_BYTES[config.precision.name]
    tokens, rows = config.micro_batch_size * config.train.seq_len, model.vocab_size
    rows //= config.parallel.tensor_parallel_size
    norm = 2 * (FP32_BYTES + compute) * tokens * model.hidden_size
    if config.backend.name == "nxd":
        return norm + tokens * rows * (compute + 2 * FP32_BYTES)
    block = min(tokens * rows, max(rows, DEVICES[config.backend.device].loss_block_entries))
    copies = 0 if compute == FP32_BYTES else 2 * compute
    return norm + state_bytes(config).weights * rows * model.hidden_size + block * (2 * FP32_BYTES + copies)


def _update(config: Config, stage: int) -> int:
    """The BF16 optimizer computes a parameter's update in FP32, one parameter after another."""
    if config.backend.name == "nxd" or state_bytes(config).weights != BF16_BYTES:
        return 0
    shards = config.data_parallel_size if config.parallel.data_parallel == "fsdp" else 1
    return _UPDATE_TENSORS * FP32_BYTES * _largest(config.model, config, stage) // shards


def _largest(model: ModelConfig, config: Config, stage: int) -> int:
    ends = {0, config.parallel.pipeline_parallel_size - 1}
    rows = max(2 * model.intermediate_size, model.vocab_size if stage in ends else 0)
    return rows * model.hidden_size // config.parallel.tensor_parallel_size


def _checkpoint_copy(config: Config, held: int) -> int:
    """Written beside training from a copy in host memory, which on a CPU is the same memory."""
    if config.backend.device != "cpu" or config.checkpoint.mode != "async":
        return 0
    return state_bytes(config).checkpoint * held


def _compiles(config: Config) -> bool:
    """Whether torch.compile chooses what to keep; NxD's graphs keep what autograd does."""
    return config.backend.compile and config.backend.name == "torch_native"


def _casts_weights(config: Config) -> bool:
    return state_bytes(config).weights > COMPUTE_BYTES[config.precision.name]
