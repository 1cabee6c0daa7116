"""Device memory that one process needs, by part; pure arithmetic.

The tensors are counted one by one, as in this project's decoder (``trainer.model.decoder``). A mixture's router is
assumed to choose each expert equally often.
``tests/trainer/test_planned_memory.py`` compares the result with what PyTorch's allocator reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import (
    BF16_BYTES,
    COMPUTE_BYTES,
    FP32_BYTES,
    average_bytes,
    expert_parameters,
    has_shape,
    kv_width,
    layer_kinds,
    layer_matrices,
    layer_parameters,
    moment_bytes,
    stage_experts,
    stage_parameters,
    state_bytes,
)
from hlatctl.plan.execution import (
    Execution,
    expert_shards,
    in_flight,
    micro_batches,
    reducers,
    sequences,
    shards,
    shards_weights,
    tokens,
)
from hlatctl.run.errors import ConfigError
from hlatctl.units import size


def activation_bytes(config: Config, execution: Execution, stage: int) -> int:
    """Return the bytes that a stage keeps for the backward passes of its micro-batches in flight."""
    layers = sum(
        number * layer_bytes(config, execution, mixture=kind) for kind, number in layer_kinds(config, stage).items()
    )
    mask = sequences(config, execution) * config.train.seq_len**2 if config.data.mask_across_documents else 0
    return int(in_flight(config, execution, stage) * layers) + mask


def layer_bytes(config: Config, execution: Execution, *, mixture: bool = False) -> int:
    """Return the bytes that one layer keeps of one micro-batch.

    Args:
        mixture: a layer with experts.
    """
    least = input_bytes(config, execution)
    if execution.recomputed == "full":
        return least
    if execution.recomputed == "operators":
        return _operators_bytes(config, execution, mixture)
    whole = unrecomputed_bytes(config, execution, mixture=mixture)
    return least + int(execution.memory_budget * (whole - least)) if execution.recomputed == "budget" else whole


def unrecomputed_bytes(config: Config, execution: Execution, *, mixture: bool = False) -> int:
    """Return the bytes that one layer keeps of one micro-batch if no product of a weight is recomputed.

    Counted as in arXiv 2205.05198, section 4, but for this decoder: per token two norms, query, key and value, rotated
    query and key (and the inputs of their norms), the attention's output, and four tensors of the feed-forward layer's
    width. A compiled layer recomputes cheap operations: it keeps no FP32 values of norms, and three of the four. With
    context parallelism the rotated key and the value are those of the whole sequence. A mixture also keeps the experts'
    inputs and results.
    """
    width = widths(config, mixture=mixture)
    compute = width.compute
    model, parallel = config.model, config.parallel
    sequence = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    # NxD gathers a product's input again in the backward pass, as in section 4.2.2; torch_native keeps it.
    inputs = 2 * compute * model.hidden_size // (1 if "keeps_inputs" in config.backend.kind.traits else sequence)
    whole = execution.context_parallel_size
    rotated = 2 * width.queries + whole * width.keys
    core = compute * (rotated + width.keys + whole * width.values + width.outputs + 2 * width.latent)
    selective = execution.recomputed == "selective"
    core += 0 if selective else _head_norms(config)
    if execution.recomputes_elementwise:
        heads = width.queries + width.keys + width.values + width.outputs
        each = compute * (2 * model.hidden_size // sequence + heads + 2 * width.ffn + 2 * width.routed)
    elif compiles(config):
        core -= compute * rotated if selective else 0
        each = 2 * compute * model.hidden_size // sequence + inputs + core
        each += compute * (3 * width.ffn + 2 * width.routed)
    else:
        core -= compute * (rotated - width.queries) if selective else 0
        each = 4 * FP32_BYTES * model.hidden_size // sequence + inputs + core
        each += compute * (4 * width.ffn + 2 * width.routed)
    # BF16 copies of FP32 weights live as long as the activations.
    copies = BF16_BYTES * layer_parameters(config, mixture=mixture) if _casts_weights(config, execution) else 0
    return tokens(config, execution) * each + copies + (0 if selective else _scores(config, execution))


def _operators_bytes(config: Config, execution: Execution, mixture: bool) -> int:
    """Return the bytes that a layer keeps if every second product is recomputed.

    These are its input and the results of attention and of both packed products. Of separate products they are query,
    value, gate and, if not compiled, down. torchtitan keeps what was exchanged with the experts' processes and
    recomputes their products; it doesn't keep anything of them without expert parallelism.
    """
    width, least, count = widths(config, mixture=mixture), input_bytes(config, execution), tokens(config, execution)
    compute = width.compute
    ffn = width.ffn if not mixture else config.model.shared_width // config.parallel.tensor_parallel_size
    routed = 2 * width.routed if config.parallel.expert_parallel_size > 1 else 0
    heads = width.queries + width.outputs + width.values + width.latent + routed
    if not execution.separate_products:
        return least + count * compute * (heads + width.keys + 2 * ffn)
    down = 0 if compiles(config) else least
    return least + count * compute * (heads + ffn) + down


def _head_norms(config: Config) -> int:
    """Return the bytes that the norms of queries and keys keep per token: their inputs, in FP32 if not compiled."""
    width = widths(config)
    each = width.compute if compiles(config) else FP32_BYTES
    return each * (width.queries + width.keys) if config.model.qk_norm != "none" else 0


class Widths(NamedTuple):
    """Entries per token of one process's tensors in a layer.

    Args:
        outputs: results of attention.
        ffn: of the feed-forward layer, or of a token's experts together.
        latent: compressed queries, keys and values of latent attention.
        routed: a token's copies for its experts.
        compute: bytes of an entry.
    """

    queries: int
    keys: int
    values: int
    outputs: int
    ffn: int
    latent: int
    routed: int
    compute: int


def widths(config: Config, *, mixture: bool = False) -> Widths:
    """Return the widths of one process's tensors in a layer.

    Args:
        mixture: a layer with experts. Each process has its part of each expert, or with expert parallelism the experts
            of its part of the sequence, which is as much work.
    """
    model, tensor = config.model, config.parallel.tensor_parallel_size
    is_latent, experts = model.kv_lora_rank is not None, model.experts_per_token
    queries, outputs = model.query_width // tensor, model.output_width // tensor
    ffn = model.shared_width + experts * model.expert_width if mixture else model.intermediate_size
    slices = tensor if config.parallel.expert_parallel_size > 1 else 1
    return Widths(
        queries=queries,
        keys=queries if is_latent else kv_width(config),
        values=outputs if is_latent else kv_width(config),
        outputs=outputs,
        ffn=ffn // tensor,
        latent=(model.q_lora_rank or 0) + (model.kv_lora_rank or 0) if is_latent else 0,
        routed=experts * model.hidden_size // slices if mixture else 0,
        compute=COMPUTE_BYTES[config.precision.name],
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
    backward = max(_backward(config, execution, kind) for kind in layer_kinds(config, stage))
    parts = [("a layer's backward pass", backward)]
    if stage == config.parallel.pipeline_parallel_size - 1:
        parts.append(("logits and loss", _loss(config, execution)))
    return max(parts, key=lambda part: part[1])


def _backward(config: Config, execution: Execution, mixture: bool) -> int:
    """Return the bytes of a layer's activation gradients, recomputed tensors, and gradients that FSDP reduces.

    FSDP has a layer's gradients in the products' precision, and the copy in FP32 that it sends.
    """
    width, count = widths(config, mixture=mixture), tokens(config, execution)
    compute, heads = width.compute, width.queries + width.outputs
    each = 3 * width.ffn + 2 * heads if compiles(config) else width.ffn + heads
    gradients = (each + width.routed) * compute * count
    held = layer_parameters(config, mixture=mixture)
    sent = (compute + FP32_BYTES) * held if shards_weights(config, execution) else 0
    if execution.recomputed in ("full", "budget"):
        # Kept tensors are already counted, except a layer's input.
        kept = layer_bytes(config, execution, mixture=mixture) - input_bytes(config, execution)
        return sent + gradients + unrecomputed_bytes(config, execution, mixture=mixture) - kept
    selective = execution.recomputed == "selective"
    again = count * (compute * (width.queries + width.keys) + _head_norms(config)) if selective else 0
    if mixture and execution.recomputed == "operators":
        again += count * compute * (3 * width.ffn + width.routed)
    return sent + gradients + again + (2 if selective else 1) * _scores(config, execution)


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
    each = DEVICES[config.backend.device].loss_rows(rows)
    block = min(count, each) * rows
    copies = 0 if compute == FP32_BYTES else 2 * compute
    sharded = shards_weights(config, execution)
    own = compute if sharded else state_bytes(config).weights
    # Blocks are added in FP32; their products have the precision of the computation.
    gradient = FP32_BYTES if count > each else own
    product = compute if gradient != compute else 0
    in_blocks = product * rows * model.hidden_size + block * (2 * FP32_BYTES + copies)
    # FSDP sends the head's gradient after the last block, unless it waits for the last micro-batch.
    sends = sharded and not scatters_once(config)
    sent = FP32_BYTES * rows * model.hidden_size if sends else 0
    return norm + gradient * rows * model.hidden_size + max(in_blocks, sent)


def compiles(config: Config) -> bool:
    """Return whether torch.compile chooses what to keep; graphs of torch-xla keep what autograd keeps."""
    return config.backend.compile and not config.backend.kind.torch_xla


def _casts_weights(config: Config, execution: Execution) -> bool:
    casts = state_bytes(config).weights > COMPUTE_BYTES[config.precision.name]
    return casts and not shards_weights(config, execution)


#: Bytes per element of the BF16 optimizer's update, and elements that it updates together (trainer.optim.adamw).
_UPDATE_BYTES, _UPDATE_ENTRIES = 48, 1 << 24


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


def largest_stage(config: Config) -> Config:
    """Return the configuration of the stage that needs the most memory; the run's own if it has no stages."""
    return max([stage.config for stage in config.stages] or [config], key=lambda of: memory(of).need_bytes)


def check_memory(config: Config) -> None:
    """Refuse a run that does not fit its devices' memory, if that is known.

    Raises:
        ConfigError: names the device's memory and the need.
    """
    need = memory(largest_stage(config))
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
    are_sharded = shards_weights(config, execution)
    weight_shards = sharing if are_sharded else 1
    activations, temporary, temporary_bytes = 0, "", 0
    if has_shape(config.model):
        activations = activation_bytes(config, execution, stage)
        temporary, temporary_bytes = work(config, execution, stage)
    moments = sharded_moment_bytes(config, execution, stage)
    average = sharded_bytes(config, execution, stage, average_bytes(config))

    def weights(bytes_each: int) -> int:
        return sharded_bytes(config, execution, stage, bytes_each) if are_sharded else bytes_each * held

    parts = [
        Part("weights", weights(each.weights)),
        Part("gradients", weights(each.gradients)),
        Part("master weights", sharded_bytes(config, execution, stage, each.master)),
        Part("moments", moments),
        Part("average of the weights", average),
        Part("gathered weights", _gathered(config, execution, stage)),
        Part("gradients not exchanged yet", _whole_gradients(config, execution, stage)),
        Part("activations", activations),
        Part(temporary, temporary_bytes),
        Part("the optimizer's update", max(0, _update(config, stage, weight_shards) - activations - temporary_bytes)),
        Part("copy of a checkpoint", _checkpoint_copy(config, weights(each.master or each.weights), moments + average)),
        Part("workspace", config.cluster.hardware.workspace_bytes, "calibrated"),
    ]
    return [part for part in parts if part.value_bytes]


def sharded_bytes(config: Config, execution: Execution, stage: int, bytes_each: int) -> int:
    """Return the bytes of a process's shard of something that each parameter of a stage has."""
    experts = stage_experts(config, stage)
    others = stage_parameters(config, stage) - experts
    return bytes_each * others // shards(config, execution) + bytes_each * experts // expert_shards(config, execution)


def sharded_moment_bytes(config: Config, execution: Execution, stage: int) -> int:
    """Return the bytes of a process's shard of a stage's moments."""
    experts = stage_experts(config, stage)
    of_experts = moment_bytes(config, experts, experts)
    others = stage_moment_bytes(config, stage) - of_experts
    return others // shards(config, execution) + of_experts // expert_shards(config, execution)


def stage_moment_bytes(config: Config, stage: int) -> int:
    """Return the bytes of the optimizer's moments of a stage."""
    return moment_bytes(config, stage_parameters(config, stage), matrix_parameters(config, stage))


def matrix_parameters(config: Config, stage: int) -> int:
    """Return one process's parameters of a stage in the matrices of layers: without norms, embedding and head."""
    if not has_shape(config.model):
        return 0
    return sum(number * layer_matrices(config, mixture=kind) for kind, number in layer_kinds(config, stage).items())


def _gathered(config: Config, execution: Execution, stage: int) -> int:
    """Return the bytes that FSDP gathers at a time: two layers, and embedding or head (arXiv 2304.11277, section 3.2).

    Tied embeddings are kept for the step. It is the whole stage where weights are kept: by ZeRO-1, without resharding,
    and in pipelines.
    """
    if not shards_weights(config, execution):
        return 0
    kinds = layer_kinds(config, stage) if has_shape(config.model) else {}
    each = {kind: layer_parameters(config, mixture=kind) for kind in kinds}
    layers = sum(number * each[kind] for kind, number in kinds.items())
    ends = stage_parameters(config, stage) - layers
    if not keeps_gathered(config, execution):
        layers = 2 * max(each.values(), default=0)
        ends -= embedding_parameters(config)
    return COMPUTE_BYTES[config.precision.name] * ends + int(layer_weight_bytes(config, execution) * layers)


def embedding_parameters(config: Config) -> int:
    """Return one process's parameters of an embedding that is not gathered together with the head; 0: there is none."""
    model = config.model
    if model.tie_embeddings or not has_shape(model):
        return 0
    return model.vocab_size // config.parallel.tensor_parallel_size * model.hidden_size


def keeps_gathered(config: Config, execution: Execution) -> bool:
    """Return whether gathered weights are kept for the whole step."""
    parallel = config.parallel
    return not execution.reshards or parallel.data_parallel == "zero1" or parallel.pipeline_parallel_size > 1


def layer_weight_bytes(config: Config, execution: Execution) -> int:
    """Return the bytes of a gathered weight of a layer: one in FP8."""
    return 1 if execution.gathers_fp8 else COMPUTE_BYTES[config.precision.name]


def scatters_once(config: Config) -> bool:
    """Return whether FSDP scatters gradients once a step: ZeRO-1 in the last micro-batch, and a pipeline after it."""
    return config.parallel.data_parallel == "zero1" or config.parallel.pipeline_parallel_size > 1


def _whole_gradients(config: Config, execution: Execution, stage: int) -> int:
    """Return the FP32 gradients that FSDP2 accumulates before it scatters them, or sums them over copies of shards."""
    if not shards_weights(config, execution) or micro_batches(config, execution) == 1:
        return 0
    if scatters_once(config):
        return FP32_BYTES * stage_parameters(config, stage)
    has_copies = reducers(config, execution) > shards(config, execution)
    sums_later = has_copies and "sums_copies_once" in config.backend.kind.traits
    return sharded_bytes(config, execution, stage, FP32_BYTES) if sums_later else 0


def _update(config: Config, stage: int, weight_shards: int) -> int:
    """Return the temporary tensors of the BF16 optimizer, which updates a part of one parameter at a time."""
    if config.backend.kind.optimizers or state_bytes(config).weights != BF16_BYTES:
        return 0
    return _UPDATE_BYTES * min(_UPDATE_ENTRIES, _largest(config, stage) // weight_shards)


def _largest(config: Config, stage: int) -> int:
    ends = {0, config.parallel.pipeline_parallel_size - 1}
    width = widths(config)
    vocabulary = config.model.vocab_size // config.parallel.tensor_parallel_size if stage in ends else 0
    dense = max(2 * width.ffn, width.queries + width.keys + width.values, vocabulary) * config.model.hidden_size
    return max(dense, expert_parameters(config) // 3 if config.model.num_experts else 0)


def _checkpoint_copy(config: Config, weights: int, moments: int) -> int:
    """Return the bytes of the copy that is written during training. On a CPU, it is in the device's memory."""
    if config.backend.device != "cpu" or config.checkpoint.mode != "async":
        return 0
    return weights + moments
