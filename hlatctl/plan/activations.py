"""What a layer keeps for its backward pass, and the temporary memory of a layer and of the loss; pure arithmetic.

The tensors are counted one by one, as in this project's decoder (``trainer.model``).
"""

from __future__ import annotations

from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import BF16_BYTES, COMPUTE_BYTES, FP32_BYTES, kv_width, layer_parameters, state_bytes
from hlatctl.plan.execution import Execution, head_width, in_flight, normalizes_heads, sequences, shards_weights, tokens


def activation_bytes(config: Config, execution: Execution, layers: int, stage: int) -> int:
    """Return what a stage keeps for the backward passes of its micro-batches in flight."""
    kept = in_flight(config, execution, stage) * layers * layer_bytes(config, execution)
    mask = sequences(config, execution) * config.train.seq_len**2 if config.data.mask_across_documents else 0
    return int(kept) + mask


def layer_bytes(config: Config, execution: Execution) -> int:
    """Return what one layer keeps of one micro-batch."""
    least = input_bytes(config, execution)
    if execution.recomputed == "full":
        return least
    if execution.recomputed == "operators":
        return _operators_bytes(config, execution)
    if execution.recomputed == "budget":
        return least + int(execution.memory_budget * (unrecomputed_bytes(config, execution) - least))
    return unrecomputed_bytes(config, execution)


def unrecomputed_bytes(config: Config, execution: Execution) -> int:
    """Return what one layer keeps of one micro-batch if no product of a weight is computed again.

    Counted as in arXiv 2205.05198, section 4, but for this decoder: per token two norms, query, key and value, rotated
    query and key (and the inputs of their norms), the attention's output, and four tensors of the feed-forward layer's
    width. A compiled layer recomputes cheap operations: it keeps no FP32 values of norms, and three of the four. With
    context parallelism the rotated key and the value are those of the whole sequence.
    """
    width, kv, ffn, compute = widths(config)
    model, parallel = config.model, config.parallel
    sequence = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    # NxD gathers a product's input again in the backward pass, as in section 4.2.2; torch_native keeps it.
    inputs = 2 * compute * model.hidden_size // (sequence if config.backend.name == "nxd" else 1)
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
    """Return what a layer keeps if every second product is computed again.

    These are its input and the results of query, value, attention, gate and, if not compiled, down.
    """
    width, kv, ffn, compute = widths(config)
    least = input_bytes(config, execution)
    down = 0 if compiles(config) else least
    return least + tokens(config, execution) * compute * (2 * width + kv + ffn) + down


def _head_norms(config: Config) -> int:
    """Return what the norms of queries and keys keep of a token: their inputs, in FP32 if not compiled."""
    width, kv, _, compute = widths(config)
    return (compute if compiles(config) else FP32_BYTES) * (width + kv) if normalizes_heads(config) else 0


def widths(config: Config) -> tuple[int, int, int, int]:
    """Return one process's widths of query heads, key heads and feed-forward layer, and the bytes of an activation."""
    model, tensor = config.model, config.parallel.tensor_parallel_size
    return (
        model.num_heads * head_width(config) // tensor,
        kv_width(config),
        model.intermediate_size // tensor,
        COMPUTE_BYTES[config.precision.name],
    )


def _scores(config: Config, execution: Execution) -> int:
    """Return a micro-batch's attention probabilities, which HLAT's model on NxD keeps (no fused kernel)."""
    if config.backend.name != "nxd":
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
    """Return a layer's gradients of activations, what it computes again, and what FSDP reduces.

    FSDP has a layer's gradients in the products' precision, and the copy in FP32 that it sends.
    """
    width, kv, ffn, compute = widths(config)
    count = tokens(config, execution)
    gradients = (3 * ffn + 4 * width if compiles(config) else ffn + 2 * width) * compute * count
    sent = (compute + FP32_BYTES) * layer_parameters(config) if shards_weights(config, execution) else 0
    if execution.recomputed in ("full", "budget"):
        # What was kept is there already, but for a layer's input.
        kept = layer_bytes(config, execution) - input_bytes(config, execution)
        return sent + gradients + unrecomputed_bytes(config, execution) - kept
    again = count * (compute * (width + kv) + _head_norms(config)) if execution.recomputed == "selective" else 0
    scores = _scores(config, execution)
    return sent + gradients + again + (2 if execution.recomputed == "selective" else 1) * scores


def _loss(config: Config, execution: Execution) -> int:
    """Return the bytes of the final norm, the logits and their gradients."""
    model, parallel, compute = config.model, config.parallel, COMPUTE_BYTES[config.precision.name]
    count, rows = tokens(config, execution), model.vocab_size // parallel.tensor_parallel_size
    norm = 2 * (FP32_BYTES + compute) * count * model.hidden_size
    if parallel.sequence_parallel:
        # The norm's slices, and the whole sequence with its gradient.
        norm = norm // parallel.tensor_parallel_size + 2 * compute * count * model.hidden_size
    if execution.logit_bytes is not None:
        return norm + execution.logit_bytes * count * rows
    if config.backend.name == "nxd":
        return norm + count * rows * (compute + 2 * FP32_BYTES)
    block = min(count * rows, max(rows, DEVICES[config.backend.device].loss_block_entries))
    copies = 0 if compute == FP32_BYTES else 2 * compute
    return norm + state_bytes(config).weights * rows * model.hidden_size + block * (2 * FP32_BYTES + copies)


def compiles(config: Config) -> bool:
    """Return whether torch.compile chooses what to keep; NxD's graphs keep what autograd keeps."""
    return config.backend.compile and config.backend.name == "torch_native"


def _casts_weights(config: Config, execution: Execution) -> bool:
    """Return whether products use copies of the weights; FSDP gathers weights in the products' precision."""
    casts = state_bytes(config).weights > COMPUTE_BYTES[config.precision.name]
    return casts and not shards_weights(config, execution)
