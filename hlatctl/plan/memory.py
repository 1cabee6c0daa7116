"""Device memory that one process needs, by part; pure arithmetic.

The tensors are counted one by one, as in this project's decoder (``trainer.model.decoder``).
``tests/trainer/test_planned_memory.py`` compares the result with what PyTorch's allocator reports.
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
    moment_bytes,
    process_layers,
    stage_parameters,
    state_bytes,
)
from hlatctl.plan.execution import Execution, in_flight, micro_batches, sequences, shards, shards_weights, tokens
from hlatctl.run.errors import ConfigError
from hlatctl.units import size


def activation_bytes(config: Config, execution: Execution, layers: int, stage: int) -> int:
    """Return the bytes that a stage keeps for the backward passes of its micro-batches in flight."""
    kept = in_flight(config, execution, stage) * layers * layer_bytes(config, execution)
    mask = sequences(config, execution) * config.train.seq_len**2 if config.data.mask_across_documents else 0
    return int(kept) + mask


def layer_bytes(config: Config, execution: Execution) -> int:
    """Return the bytes that one layer keeps of one micro-batch."""
    least = input_bytes(config, execution)
    if execution.recomputed == "full":
        return least
    if execution.recomputed == "operators":
        return _operators_bytes(config, execution)
    if execution.recomputed == "budget":
        return least + int(execution.memory_budget * (unrecomputed_bytes(config, execution) - least))
    return unrecomputed_bytes(config, execution)


def unrecomputed_bytes(config: Config, execution: Execution) -> int:
    """Return the bytes that one layer keeps of one micro-batch if no product of a weight is recomputed.

    Counted as in arXiv 2205.05198, section 4, but for this decoder: per token two norms, query, key and value, rotated
    query and key (and the inputs of their norms), the attention's output, and four tensors of the feed-forward layer's
    width. A compiled layer recomputes cheap operations: it keeps no FP32 values of norms, and three of the four. With
    context parallelism the rotated key and the value are those of the whole sequence.
    """
    width, kv, ffn, compute = widths(config)
    model, parallel = config.model, config.parallel
    sequence = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    # NxD gathers a product's input again in the backward pass, as in section 4.2.2; torch_native keeps it.
    inputs = 2 * compute * model.hidden_size // (1 if "keeps_inputs" in config.backend.kind.traits else sequence)
    whole = execution.context_parallel_size
    core = compute * (2 * width + (1 + 2 * whole) * kv + width)
    selective = execution.recomputed == "selective"
    core += 0 if selective else _head_norms(config)
    if execution.recomputes_elementwise:
        each = compute * (2 * model.hidden_size // sequence + 2 * width + 2 * kv + 2 * ffn)
    elif compiles(config):
        core -= compute * (2 * width + whole * kv) if selective else 0
        each = 2 * compute * model.hidden_size // sequence + inputs + core + 3 * compute * ffn
    else:
        core -= compute * (width + whole * kv) if selective else 0
        each = 4 * FP32_BYTES * model.hidden_size // sequence + inputs + core + 4 * compute * ffn
    # BF16 copies of FP32 weights live as long as the activations.
    copies = BF16_BYTES * layer_parameters(config) if _casts_weights(config, execution) else 0
    return tokens(config, execution) * each + copies + (0 if selective else _scores(config, execution))


def _operators_bytes(config: Config, execution: Execution) -> int:
    """Return the bytes that a layer keeps if every second product is recomputed.

    These are its input and the results of attention and of both packed products. Of separate products they are query,
    value, gate and, if not compiled, down.
    """
    width, kv, ffn, compute = widths(config)
    least = input_bytes(config, execution)
    if not execution.separate_products:
        return least + tokens(config, execution) * compute * (2 * width + 2 * kv + 2 * ffn)
    down = 0 if compiles(config) else least
    return least + tokens(config, execution) * compute * (2 * width + kv + ffn) + down


def _head_norms(config: Config) -> int:
    """Return the bytes that the norms of queries and keys keep per token: their inputs, in FP32 if not compiled."""
    width, kv, _, compute = widths(config)
    return (compute if compiles(config) else FP32_BYTES) * (width + kv) if config.model.qk_norm != "none" else 0


def widths(config: Config) -> tuple[int, int, int, int]:
    """Return one process's widths of query heads, key heads and feed-forward layer, and the bytes of an activation."""
    model, tensor = config.model, config.parallel.tensor_parallel_size
    return (
        model.num_heads * config.model.head_width // tensor,
        kv_width(config),
        model.intermediate_size // tensor,
        COMPUTE_BYTES[config.precision.name],
    )


def _scores(config: Config, execution: Execution) -> int:
    """Return a micro-batch's attention probabilities, which HLAT's model on NxD keeps (no fused kernel)."""
    if "fused_attention" in config.backend.kind.traits:
        return 0
    heads = config.model.num_heads // config.parallel.tensor_parallel_size
    return COMPUTE_BYTES[config.precision.name] * tokens(config, execution) * heads * config.train.seq_len


def input_bytes(config: Config, execution: Execution) -> int:
    """Return a layer's input of one micro-batch."""
    sequence = config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1
    return COMPUTE_BYTES[config.precision.name] * tokens(config, execution) * config.model.hidden_size // sequence


def work(config: Config, execution: Execution, stage: int) -> tuple[str, int]:
    """Return the larger temporary part with its name: the loss, or one layer's backward pass."""
    parts = [("a layer's backward pass", _backward(config, execution))]
    if stage == config.parallel.pipeline_parallel_size - 1:
        parts.append(("logits and loss", _loss(config, execution)))
    return max(parts, key=lambda part: part[1])


def _backward(config: Config, execution: Execution) -> int:
    """Return the bytes of a layer's activation gradients, recomputed tensors, and gradients that FSDP reduces.

    FSDP has a layer's gradients in the products' precision, and the copy in FP32 that it sends.
    """
    width, kv, ffn, compute = widths(config)
    count = tokens(config, execution)
    gradients = (3 * ffn + 4 * width if compiles(config) else ffn + 2 * width) * compute * count
    sent = (compute + FP32_BYTES) * layer_parameters(config) if shards_weights(config, execution) else 0
    if execution.recomputed in ("full", "budget"):
        # Kept tensors are already counted, except a layer's input.
        kept = layer_bytes(config, execution) - input_bytes(config, execution)
        return sent + gradients + unrecomputed_bytes(config, execution) - kept
    again = count * (compute * (width + kv) + _head_norms(config)) if execution.recomputed == "selective" else 0
    scores = _scores(config, execution)
    return sent + gradients + again + (2 if execution.recomputed == "selective" else 1) * scores


def _loss(config: Config, execution: Execution) -> int:
    model, parallel, compute = config.model, config.parallel, COMPUTE_BYTES[config.precision.name]
    count, rows = tokens(config, execution), model.vocab_size // parallel.tensor_parallel_size
    norm = 2 * (FP32_BYTES + compute) * count * model.hidden_size
    if parallel.sequence_parallel:
        # The norm's slices, and the whole sequence with its gradient.
        norm = norm // parallel.tensor_parallel_size + 2 * compute * count * model.hidden_size
    if execution.logit_bytes is not None:
        return norm + execution.logit_bytes * count * rows
    if "blocks_of_loss" not in config.backend.kind.traits:
        return norm + count * rows * (compute + 2 * FP32_BYTES)
    block = min(count * rows, max(rows, DEVICES[config.backend.device].loss_block_entries))
    copies = 0 if compute == FP32_BYTES else 2 * compute
    return norm + state_bytes(config).weights * rows * model.hidden_size + block * (2 * FP32_BYTES + copies)


def compiles(config: Config) -> bool:
    """Return whether torch.compile chooses what to keep; graphs of torch-xla keep what autograd keeps."""
    return config.backend.compile and not config.backend.kind.torch_xla


def _casts_weights(config: Config, execution: Execution) -> bool:
    casts = state_bytes(config).weights > COMPUTE_BYTES[config.precision.name]
    return casts and not shards_weights(config, execution)


#: FP32 tensors of a parameter's size in the BF16 optimizer's update of it (trainer.optim.adamw).
_UPDATE_TENSORS = 7


@dataclass(frozen=True)
class Part:
    """A part of the peak memory; ``kind`` is ``derived`` or ``calibrated``."""

    name: str
    value_bytes: int
    kind: str = "derived"


@dataclass(frozen=True)
class Memory:
    """Memory of the process that needs most, and of its device (None: unknown)."""

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
        execution: how other software runs it; None: as the configuration says.
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
    # They are allocated while activations are freed: both exist together only from the second micro-batch on.
    early = own_gradients if micro_batches(config, execution) > 1 else 0
    update = own_gradients - early + _update(config, stage, weight_shards)
    activations = activation_bytes(config, execution, len(process_layers(config, stage)), stage)
    temporary, temporary_bytes = work(config, execution, stage)
    moments = stage_moment_bytes(config, stage) // sharing
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


def stage_moment_bytes(config: Config, stage: int) -> int:
    """Return the bytes of the optimizer's moments of a stage."""
    return moment_bytes(config, stage_parameters(config, stage), matrix_parameters(config, stage))


def matrix_parameters(config: Config, stage: int) -> int:
    """Return one process's parameters of a stage in the matrices of layers: without norms, embedding and head."""
    (width, kv, ffn, _), hidden = widths(config), config.model.hidden_size
    return len(process_layers(config, stage)) * hidden * (2 * width + 2 * kv + 3 * ffn)


def _gathered(config: Config, execution: Execution, stage: int) -> int:
    """Return the bytes that FSDP gathers at a time: two layers, embedding and head (arXiv 2304.11277, section 3.2).

    It is the whole stage where weights are kept for the step: by ZeRO-1, without resharding, and in pipelines.
    """
    if not shards_weights(config, execution):
        return 0
    layers = len(process_layers(config, stage)) * layer_parameters(config)
    ends = stage_parameters(config, stage) - layers
    if not keeps_gathered(config, execution):
        layers = 2 * layer_parameters(config)
    return COMPUTE_BYTES[config.precision.name] * ends + int(layer_weight_bytes(config, execution) * layers)


def keeps_gathered(config: Config, execution: Execution) -> bool:
    """Return whether gathered weights are kept for the whole step."""
    parallel = config.parallel
    return not execution.reshards or parallel.data_parallel == "zero1" or parallel.pipeline_parallel_size > 1


def layer_weight_bytes(config: Config, execution: Execution) -> int:
    """Return the bytes of a gathered weight of a layer: one in FP8."""
    return 1 if execution.gathers_fp8 else COMPUTE_BYTES[config.precision.name]


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
    if config.backend.kind.optimizers or state_bytes(config).weights != BF16_BYTES:
        return 0
    return _UPDATE_TENSORS * FP32_BYTES * _largest(config, stage) // weight_shards


def _largest(config: Config, stage: int) -> int:
    ends = {0, config.parallel.pipeline_parallel_size - 1}
    width, kv, ffn, _ = widths(config)
    vocabulary = config.model.vocab_size // config.parallel.tensor_parallel_size if stage in ends else 0
    return max(2 * ffn, width + 2 * kv, vocabulary) * config.model.hidden_size


def _checkpoint_copy(config: Config, held: int, moments: int) -> int:
    """Return the bytes of the copy that is written during training. On a CPU, it is in the device's memory."""
    if config.backend.device != "cpu" or config.checkpoint.mode != "async":
        return 0
    each = state_bytes(config)
    return (each.master or each.weights) * held + moments
