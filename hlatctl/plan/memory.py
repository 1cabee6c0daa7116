"""Device memory that one process needs, by part; pure arithmetic.

The tensors that backward passes keep are counted one by one, as in this project's decoder (``trainer.model``).
``tests/trainer/test_planned_memory.py`` compares the result with what PyTorch's allocator gives out.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import (
    BF16_BYTES,
    COMPUTE_BYTES,
    FP32_BYTES,
    kv_width,
    layer_parameters,
    process_layers,
    stage_parameters,
    state_bytes,
)
from hlatctl.plan.execution import OURS, Execution
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


def memory(config: Config, execution: Execution = OURS) -> Memory:
    """Return the peak of the process that needs most: in the first pipeline stage or the last one."""
    stages = {0, config.parallel.pipeline_parallel_size - 1}
    needs = (Memory(_parts(config, execution, stage), config.cluster.hardware.memory_bytes) for stage in sorted(stages))
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
    layout, replicas = config.parallel.data_parallel, config.data_parallel_size
    sharded = replicas if layout == "fsdp" else 1
    optimizer_shards = replicas if layout in ("fsdp", "zero1") else 1
    own_gradients = each.own_gradients * held // sharded
    # They are allocated while activations are freed: both exist at once only from the second micro-batch on.
    early = own_gradients if config.grad_accum_steps > 1 else 0
    update = own_gradients - early + _update(config, stage)
    activations, (work, work_bytes) = _activations(config, execution, stage), _work(config, execution, stage)
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
    """Return what FSDP gathers at a time: two layers, embedding and head (arXiv 2304.11277, section 3.2).

    With pipeline stages it is the whole stage, and its gradients: they are scattered after the last micro-batch.
    """
    if config.parallel.data_parallel != "fsdp" or config.data_parallel_size == 1:
        return 0
    compute = COMPUTE_BYTES[config.precision.name]
    if config.parallel.pipeline_parallel_size > 1:
        return (compute + FP32_BYTES) * stage_parameters(config, stage)
    ends = stage_parameters(config, stage) - len(process_layers(config, stage)) * layer_parameters(config)
    return compute * (ends + 2 * layer_parameters(config))


def _activations(config: Config, execution: Execution, stage: int) -> int:
    """Return what a stage keeps for the backward passes of its micro-batches in flight.

    With 1F1B these are at most as many as there are stages from it to the last (arXiv 2104.04473, section 2.2). With v
    chunks of a stage they are up to (p - 1) / v more (section 2.2.2).
    """
    stages = config.parallel.pipeline_parallel_size
    in_flight = min(stages - stage + (stages - 1) * (execution.chunks - 1) / execution.chunks, config.grad_accum_steps)
    kept = (
        _input_bytes(config) if config.parallel.activation_checkpointing == "full" else layer_bytes(config, execution)
    )
    mask = config.micro_batch_size * config.train.seq_len**2 if config.data.mask_across_documents else 0
    return int(in_flight * len(process_layers(config, stage)) * kept) + mask


def layer_bytes(config: Config, execution: Execution = OURS) -> int:
    """Return what one layer keeps of one micro-batch without full recomputation.

    Counted as in arXiv 2205.05198, section 4, but for this decoder: per token two norms, query, key and value, rotated
    query and key, the attention's output, and four tensors of the feed-forward layer's width. A compiled layer
    recomputes cheap operations: it keeps no FP32 values of norms, and three of the four.
    """
    if execution.recomputes_half:
        return _half_layer_bytes(config)
    width, kv, ffn, compute = _widths(config)
    model, parallel = config.model, config.parallel
    sequence = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    # NxD gathers a product's input again in the backward pass, as in section 4.2.2; torch_native keeps it.
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


def _half_layer_bytes(config: Config) -> int:
    """Return what a layer keeps if every second product is recomputed (torchtitan's option ``op``).

    These are its input and the results of query, value, attention, gate and, if not compiled, down.
    """
    width, kv, ffn, compute = _widths(config)
    tokens = config.micro_batch_size * config.train.seq_len
    down = 0 if _compiles(config) else _input_bytes(config)
    return _input_bytes(config) + tokens * compute * (2 * width + kv + ffn) + down


def _widths(config: Config) -> tuple[int, int, int, int]:
    """Return one process's widths of query heads, key heads and feed-forward layer, and the bytes of an activation."""
    model, tensor = config.model, config.parallel.tensor_parallel_size
    return (
        model.hidden_size // tensor,
        kv_width(config),
        model.intermediate_size // tensor,
        COMPUTE_BYTES[config.precision.name],
    )


def _scores(config: Config) -> int:
    """Return a micro-batch's attention probabilities, which HLAT's model on NxD keeps (no fused kernel)."""
    if config.backend.name != "nxd":
        return 0
    heads = config.model.num_heads // config.parallel.tensor_parallel_size
    return COMPUTE_BYTES[config.precision.name] * config.micro_batch_size * heads * config.train.seq_len**2


def _input_bytes(config: Config) -> int:
    """Return a layer's input of one micro-batch."""
    sequence = config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1
    tokens = config.micro_batch_size * config.train.seq_len
    return COMPUTE_BYTES[config.precision.name] * tokens * config.model.hidden_size // sequence


def _work(config: Config, execution: Execution, stage: int) -> tuple[str, int]:
    """Return the larger temporary part with its name: the loss, or one layer's backward pass."""
    backward = _backward(config)
    if stage < config.parallel.pipeline_parallel_size - 1:
        return "a layer's backward pass", backward
    return max(
        ("a layer's backward pass", backward), ("logits and loss", _loss(config, execution)), key=lambda one: one[1]
    )


def _backward(config: Config) -> int:
    width, kv, ffn, compute = _widths(config)
    tokens = config.micro_batch_size * config.train.seq_len
    checkpointing = config.parallel.activation_checkpointing
    gradients = (3 * ffn + 4 * width if _compiles(config) else ffn + 2 * width) * compute * tokens
    if checkpointing == "full":
        return gradients + layer_bytes(config)
    again = compute * tokens * (width + kv) + _scores(config) if checkpointing == "selective" else 0
    return gradients + again + _scores(config)


def _loss(config: Config, execution: Execution) -> int:
    """Return the bytes of the final norm, the logits and their gradients."""
    model, parallel, compute = config.model, config.parallel, COMPUTE_BYTES[config.precision.name]
    tokens, rows = config.micro_batch_size * config.train.seq_len, model.vocab_size
    rows //= config.parallel.tensor_parallel_size
    norm = 2 * (FP32_BYTES + compute) * tokens * model.hidden_size
    if parallel.sequence_parallel:
        # The norm's slices, and the whole sequence with its gradient.
        norm = norm // parallel.tensor_parallel_size + 2 * compute * tokens * model.hidden_size
    if execution.logit_bytes is not None:
        return norm + execution.logit_bytes * tokens * rows
    if config.backend.name == "nxd":
        return norm + tokens * rows * (compute + 2 * FP32_BYTES)
    block = min(tokens * rows, max(rows, DEVICES[config.backend.device].loss_block_entries))
    copies = 0 if compute == FP32_BYTES else 2 * compute
    return norm + state_bytes(config).weights * rows * model.hidden_size + block * (2 * FP32_BYTES + copies)


def _update(config: Config, stage: int) -> int:
    """Return the FP32 tensors of the BF16 optimizer, which updates one parameter at a time."""
    if config.backend.name == "nxd" or state_bytes(config).weights != BF16_BYTES:
        return 0
    shards = config.data_parallel_size if config.parallel.data_parallel == "fsdp" else 1
    return _UPDATE_TENSORS * FP32_BYTES * _largest(config, stage) // shards


def _largest(config: Config, stage: int) -> int:
    ends = {0, config.parallel.pipeline_parallel_size - 1}
    rows = max(2 * config.model.intermediate_size, config.model.vocab_size if stage in ends else 0)
    return rows * config.model.hidden_size // config.parallel.tensor_parallel_size


def _checkpoint_copy(config: Config, held: int) -> int:
    """Return the copy that is written while training continues; on a CPU, host memory is the device's memory."""
    if config.backend.device != "cpu" or config.checkpoint.mode != "async":
        return 0
    return state_bytes(config).checkpoint * held


def _compiles(config: Config) -> bool:
    """Return whether torch.compile chooses what to keep; NxD's graphs keep what autograd keeps."""
    return config.backend.compile and config.backend.name == "torch_native"


def _casts_weights(config: Config) -> bool:
    """Return whether products use copies of the weights; FSDP gathers weights in the products' precision."""
    casts = state_bytes(config).weights > COMPUTE_BYTES[config.precision.name]
    return casts and config.parallel.data_parallel != "fsdp"
