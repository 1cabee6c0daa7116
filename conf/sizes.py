"""Sizes that follow from a configuration: parameters, bytes per parameter, checkpoints and the disk space they need.

Plan, preflight, trainer and simulation all use these numbers. Nothing here is measured, and nothing imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.registries import OPTIMIZERS, StateBytes
from conf.schema import Config, ModelConfig

FP32_BYTES, BF16_BYTES = 4, 2
#: Bytes of one activation, by ``precision.name``.
COMPUTE_BYTES = {"fp32": FP32_BYTES, "mixed": BF16_BYTES, "fp8": BF16_BYTES, "bf16_sr": BF16_BYTES, "bf16": BF16_BYTES}
#: In addition to tensors, each process writes its random state and its position in the corpus (10.4 kB measured on one
#: CPU process; equal random states are stored once), and the header of its shard and the list of its blocks: about 240
#: bytes per tensor, of which a process of 70B in 8 stages has 180.
CHECKPOINT_BYTES_PER_PROCESS = 64 << 10
#: ``checkpoint.fast_dir`` contains the newest verified checkpoint and the one that is being written.
FAST_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a model, by module."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    lm_head: int

    @property
    def total(self) -> int:
        """The sum of all modules."""
        return self.embedding + self.attention + self.feed_forward + self.norms + self.lm_head


def parameters(model: ModelConfig) -> Parameters:
    """Return the exact parameter counts of a decoder without biases.

    Per layer: query and output projections of hidden x (heads x head_dim), key and value projections of hidden x
    (kv_heads x head_dim), gate, up and down projections of hidden x intermediate, two RMSNorms, and those of queries
    and keys. One RMSNorm follows the last layer.
    """
    hidden, layers = model.hidden_size, model.num_layers
    return Parameters(
        embedding=model.vocab_size * hidden,
        attention=layers * 2 * hidden * (model.query_width + model.kv_width),
        feed_forward=layers * 3 * hidden * model.intermediate_size,
        norms=(2 * layers + 1) * hidden + layers * sum(qk_norm_widths(model)),
        lm_head=0 if model.tie_embeddings else model.vocab_size * hidden,
    )


def qk_norm_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters of a layer's norm of queries and of its norm of keys."""
    head = model.head_width
    return {"none": (0, 0), "head": (head, head), "all": (model.query_width, model.kv_width)}[model.qk_norm]


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs of one token's forward and backward pass: 6 N + 12 layers x (heads x head_dim) x seq_len.

    Counted as in PaLM (arXiv 2204.02311, appendix B): a multiplication and an addition are two FLOPs, the backward pass
    costs twice the forward pass, attention scores are counted in full although half of them are masked, and
    recomputation does not count. N excludes the embedding, which is looked up and not multiplied (unless it is also
    the output projection).
    """
    counts = parameters(model)
    multiplied = counts.total - (0 if model.tie_embeddings else counts.embedding)
    return 6 * multiplied + 12 * model.num_layers * model.query_width * seq_len


def mfu(config: Config, tokens_per_s: float, peak_flops_per_s: float | None) -> float | None:
    """Return the model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): a fraction; None without the peak.

    Args:
        tokens_per_s: tokens per second of all devices together.
        peak_flops_per_s: peak of one device.
    """
    if not peak_flops_per_s:
        return None
    used_flops_per_s = tokens_per_s * flops_per_token(config.model, config.train.seq_len)
    return used_flops_per_s / (peak_flops_per_s * config.world_size)


def state_bytes(config: Config) -> StateBytes:
    """Return the bytes per parameter of a configuration's backend and precision."""
    return config.backend.kind.state_bytes[config.precision.name]


def moment_bytes(config: Config, parameters: int, matrices: int) -> int:
    """Return the bytes of the optimizer's moments of some parameters.

    Args:
        matrices: how many of the parameters are in the matrices of layers.
    """
    optimizer = OPTIMIZERS[config.optimizer.name]
    moments = optimizer.moments * (parameters - matrices) + optimizer.matrix_moments * matrices
    return state_bytes(config).moment * moments


def stage_layers(config: Config, stage: int) -> range:
    """Return the layers of a pipeline stage: split as evenly as possible, with the larger shares first."""
    share, extra = divmod(config.model.num_layers, config.parallel.pipeline_parallel_size * config.stages_per_process)
    start = stage * share + min(stage, extra)
    return range(start, start + share + (stage < extra))


def process_stages(config: Config, pp_rank: int) -> list[range]:
    """Return the layers of each stage of a process, by its place in the pipeline."""
    size = config.parallel.pipeline_parallel_size
    return [stage_layers(config, pp_rank + size * number) for number in range(config.stages_per_process)]


def process_layers(config: Config, pp_rank: int) -> list[int]:
    """Return all layers of a process, by its place in the pipeline."""
    return [layer for layers in process_stages(config, pp_rank) for layer in layers]


def stage_parameters(config: Config, pp_rank: int) -> int:
    """Return the parameters of one process, by its place in the pipeline, before sharding over replicas."""
    counts, tensor = parameters(config.model), config.parallel.tensor_parallel_size
    total = len(process_layers(config, pp_rank)) * layer_parameters(config)
    if pp_rank == 0:
        total += counts.embedding // tensor
    if pp_rank == config.parallel.pipeline_parallel_size - 1:
        total += counts.lm_head // tensor + config.model.hidden_size
    return total


def layer_parameters(config: Config) -> int:
    """Return one process's parameters of a layer.

    Projections are divided by the tensor-parallel size, norms are not (except those of all heads together), and key and
    value heads are copied if there are fewer than processes.
    """
    model, tensor = config.model, config.parallel.tensor_parallel_size
    products = 2 * model.hidden_size * model.query_width + 3 * model.hidden_size * model.intermediate_size
    norms = 2 * model.hidden_size + sum(qk_norm_widths(model)) // (tensor if model.qk_norm == "all" else 1)
    return products // tensor + 2 * model.hidden_size * kv_width(config) + norms


def kv_width(config: Config) -> int:
    """Return the width of one process's keys (and of its values)."""
    model = config.model
    return max(1, model.num_kv_heads // config.parallel.tensor_parallel_size) * model.head_width


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint, of all processes together: tensors, loader and random state, headers."""
    each, counts = state_bytes(config), parameters(config.model)
    weights = (each.master or each.weights) * counts.total
    moments = moment_bytes(config, counts.total, counts.attention + counts.feed_forward)
    return weights + moments + config.world_size * CHECKPOINT_BYTES_PER_PROCESS


def export_bytes(config: Config) -> int:
    """Return the bytes that a milestone's export needs: weights in the checkpoint's number format.

    Without a copy (``EvalConfig.reads_checkpoints``) it has 0 bytes of weights.
    """
    if config.eval.reads_checkpoints:
        return 0
    each = state_bytes(config)
    return parameters(config.model).total * (each.master or each.weights)


def checkpoints_kept(config: Config) -> int:
    """Return the maximum number of checkpoints in the run directory, without the one that is being written.

    These are the permanent ones, those of milestones (if none is evaluated yet), and the newest ``checkpoint.keep`` of
    the others. A step that is permanent and a milestone counts once.
    """
    every, total = config.checkpoint.every_steps, config.total_steps
    protected = {*config.milestones, *config.permanent_steps}
    begun_with = config.fork.run is not None
    written = begun_with + total // every - config.fork.step // every + (total % every > 0)
    others = written - sum(step % every == 0 or step == total for step in protected)
    return len(protected) + min(config.checkpoint.keep, others)


def runs_dir_bytes(config: Config, existing: int = 0) -> int:
    """Return the free space that a run's checkpoints still need in ``runs_dir``: those kept, and one being written.

    Args:
        existing: number of checkpoints that are already in the run directory.
    """
    return checkpoint_bytes(config) * max(1, checkpoints_kept(config) + 1 - existing)


def fast_dir_bytes(config: Config, existing: int = 0) -> int:
    """Return the free space that checkpoints still need in ``checkpoint.fast_dir``; 0 if it is not set."""
    if config.checkpoint.fast_dir is None:
        return 0
    return checkpoint_bytes(config) * max(1, FAST_CHECKPOINTS - existing)
