"""Sizes that follow from a configuration: parameters, bytes per parameter, checkpoints and the disk space they need.

Plan, preflight, trainer and simulation all use these numbers. Nothing here is measured, and nothing imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from conf.registries import OPTIMIZERS, StateBytes
from conf.schema import Config, ModelConfig
from hlatctl.run.errors import ConfigError

FP32_BYTES, BF16_BYTES = 4, 2
#: Bytes of one activation, by ``precision.name``.
COMPUTE_BYTES = {"fp32": FP32_BYTES, "mixed": BF16_BYTES, "fp8": BF16_BYTES, "bf16_sr": BF16_BYTES, "bf16": BF16_BYTES}
#: In addition to tensors, each process writes its random state and its position in the corpus (10.4 kB measured on one
#: CPU process; equal random states are stored once), and the header of its shard and the list of its blocks: about 240
#: bytes per tensor, of which a process of 70B in 8 stages has 180.
CHECKPOINT_BYTES_PER_PROCESS = 64 << 10
#: Copies of a share in memory: the newest complete one, and the one that is being made.
MEMORY_COPIES = 2
#: Size of /dev/shm on Linux, unless it is mounted with another one (tmpfs(5)).
SHARED_MEMORY_FRACTION = 0.5
#: ``checkpoint.fast_dir`` contains the newest verified checkpoint and the one that is being written.
FAST_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a model, by module.

    Args:
        feed_forward: those of dense layers, and shared experts.
        experts: all experts that a router chooses from.
        active_experts: those of ``experts`` that one token uses.
        other: what a model of ``model.module`` has besides, such as biases; without its shape, all parameters.
        active_other: those of ``other`` that one token uses.
    """

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    lm_head: int
    routers: int = 0
    experts: int = 0
    active_experts: int = 0
    other: int = 0
    active_other: int = 0

    @property
    def total(self) -> int:
        """The sum of all modules."""
        return self._always + self.experts + self.other

    @property
    def active(self) -> int:
        """Parameters that one token uses, with the embedding (as torchtitan counts them)."""
        return self._always + self.active_experts + self.active_other

    @property
    def matrices(self) -> int:
        """Those in the matrices of layers."""
        return self.attention + self.feed_forward + self.routers + self.experts

    @property
    def _always(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.lm_head + self.routers


#: How much ``model.total_parameters`` may differ from the shape's count, such as by biases.
_SHAPE_TOLERANCE = 0.02


def parameters(model: ModelConfig) -> Parameters:
    """Return the exact parameter counts.

    Per layer: query and output projections of hidden x (heads x head_dim), key and value projections of hidden x
    (kv_heads x head_dim), gate, up and down projections of hidden x intermediate, two RMSNorms, and those of queries
    and keys. One RMSNorm follows the last layer. A mixture has, in place of the feed-forward layer, a router of
    hidden x experts and three such projections for each expert. The counts equal those of torchtitan's
    ``get_nparams_and_flops``.

    Raises:
        ConfigError: ``model.module`` is set, and ``model.total_parameters`` is not.
    """
    shape = _of_shape(model)
    if model.module is None:
        return shape
    if model.total_parameters is None:
        raise ConfigError(
            f"model.total_parameters=null: unknown for model.module={model.module}",
            hint="install torchtitan here (docs/engines.md), or set model.total_parameters and model.active_parameters "
            'to the counts in its log, "Total parameter count"',
        )
    total, active = model.total_parameters, model.active_parameters or model.total_parameters
    if not has_shape(model):
        return Parameters(
            embedding=0, attention=0, feed_forward=0, norms=0, lm_head=0, other=total, active_other=active
        )
    return replace(shape, other=total - shape.total, active_other=active - shape.active)


def has_shape(model: ModelConfig) -> bool:
    """Return whether the other keys describe a model of ``model.module``: their count is its count within 2 %."""
    if model.module is None or model.total_parameters is None:
        return model.module is None
    return abs(_of_shape(model).total / model.total_parameters - 1.0) <= _SHAPE_TOLERANCE


def _of_shape(model: ModelConfig) -> Parameters:
    hidden, layers = model.hidden_size, model.num_layers
    mixtures = max(0, layers - model.num_dense_layers) if model.num_experts else 0
    each = mixtures * 3 * hidden * model.expert_width
    return Parameters(
        embedding=model.vocab_size * hidden,
        attention=layers * _attention(model),
        feed_forward=3 * hidden * ((layers - mixtures) * model.intermediate_size + mixtures * model.shared_width),
        norms=(2 * layers + 1) * hidden + layers * sum(qk_norm_widths(model)),
        lm_head=0 if model.tie_embeddings else model.vocab_size * hidden,
        routers=mixtures * hidden * model.num_experts,
        experts=each * model.num_experts,
        active_experts=each * min(model.experts_per_token, model.num_experts),
    )


def _attention(model: ModelConfig, tensor: int = 1, kv: int | None = None) -> int:
    """Return one process's weights of a layer's attention; those of latent attention's compression are not divided.

    Args:
        tensor: processes that share the layer.
        kv: width of one process's keys; None: of all.
    """
    hidden, heads = model.hidden_size, model.num_heads
    if model.kv_lora_rank is None:
        return 2 * hidden * model.query_width // tensor + 2 * hidden * (model.kv_width if kv is None else kv)
    compression = hidden * (model.kv_lora_rank + model.qk_rope_head_dim + (model.q_lora_rank or 0))
    queries = (model.q_lora_rank or hidden) * model.query_width
    keys_and_values = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return compression + (queries + keys_and_values + model.output_width * hidden) // tensor


def qk_norm_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters of a layer's norm of queries and of its norm of keys; of latent ones, if compressed."""
    if model.kv_lora_rank is not None:
        return model.q_lora_rank or 0, model.kv_lora_rank
    head = model.head_width
    return {"none": (0, 0), "head": (head, head), "all": (model.query_width, model.kv_width)}[model.qk_norm]


def layer_kinds(config: Config, pp_rank: int) -> dict[bool, int]:
    """Return the number of a process's layers without experts (False) and with experts (True), if there are any."""
    layers = process_layers(config, pp_rank)
    mixtures = sum(config.model.is_mixture(layer) for layer in layers)
    return {kind: number for kind, number in ((False, len(layers) - mixtures), (True, mixtures)) if number}


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs of one token's forward and backward pass: 6 N + 12 layers x (heads x head_dim) x seq_len.

    Counted as in PaLM (arXiv 2204.02311, appendix B): a multiplication and an addition are two FLOPs, the backward pass
    costs twice the forward pass, attention scores are counted in full although half of them are masked, and
    recomputation does not count. N are the active parameters without the embedding, which is looked up and not
    multiplied (unless it is also the output projection). With latent attention, half of the second term has the width
    of queries and half that of values. torchtitan's ``get_nparams_and_flops`` counts the same. For a model of
    ``model.module`` that torchtitan didn't count, and whose shape is unknown, only 6 N with the embedding is counted.
    """
    if model.flops_per_token is not None:
        return model.flops_per_token + model.score_flops_per_token * seq_len
    scores = model.num_layers * (model.query_width + model.output_width) if has_shape(model) else 0
    return 6 * multiplied_parameters(model) + 6 * scores * seq_len


def multiplied_parameters(model: ModelConfig) -> int:
    """Return the parameters that a token is multiplied with: the active ones without the input embedding."""
    counts = parameters(model)
    return counts.active - (0 if model.tie_embeddings else counts.embedding)


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


def average_bytes(config: Config) -> int:
    """Return the bytes per parameter of the average of the weights, which is FP32."""
    return 0 if config.optimizer.ema_decay is None else FP32_BYTES


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
    counts, tensor, stages = (
        parameters(config.model),
        config.parallel.tensor_parallel_size,
        config.parallel.pipeline_parallel_size,
    )
    total = counts.other // (stages * tensor)
    if not has_shape(config.model):
        return total
    total += sum(
        number * layer_parameters(config, mixture=kind) for kind, number in layer_kinds(config, pp_rank).items()
    )
    if pp_rank == 0:
        total += counts.embedding // tensor
    if pp_rank == stages - 1:
        total += counts.lm_head // tensor + config.model.hidden_size
    return total


def layer_parameters(config: Config, *, mixture: bool = False) -> int:
    """Return one process's parameters of a layer: its matrices, and norms, which only those of all heads divide.

    Args:
        mixture: a layer with experts.
    """
    model = config.model
    divided_by = config.parallel.tensor_parallel_size if model.qk_norm == "all" else 1
    norms = 2 * model.hidden_size + sum(qk_norm_widths(model)) // divided_by
    return layer_matrices(config, mixture=mixture) + norms


def layer_matrices(config: Config, *, mixture: bool = False) -> int:
    """Return one process's parameters of a layer in matrices.

    Projections are divided by the tensor-parallel size, routers are not, and key and value heads are copied if there
    are fewer than processes.
    """
    model, tensor = config.model, config.parallel.tensor_parallel_size
    width = model.shared_width if mixture else model.intermediate_size
    total = _attention(model, tensor, kv_width(config)) + 3 * model.hidden_size * width // tensor
    return total + model.hidden_size * model.num_experts + expert_parameters(config) if mixture else total


def expert_parameters(config: Config) -> int:
    """Return one process's parameters of a layer's experts that a router chooses from."""
    model = config.model
    return 3 * model.hidden_size * model.expert_width * model.num_experts // expert_slices(config)


def stage_experts(config: Config, pp_rank: int) -> int:
    """Return the parameters of one process in experts, by its place in the pipeline, before sharding over replicas."""
    if not has_shape(config.model):
        return 0
    return layer_kinds(config, pp_rank).get(True, 0) * expert_parameters(config)


def expert_slices(config: Config) -> int:
    """Return the number of processes that share a layer's experts; without expert parallelism they share each one."""
    parallel = config.parallel
    return parallel.expert_parallel_size if parallel.expert_parallel_size > 1 else parallel.tensor_parallel_size


def kv_width(config: Config) -> int:
    """Return the width of one process's keys (and of its values)."""
    model = config.model
    return max(1, model.num_kv_heads // config.parallel.tensor_parallel_size) * model.head_width


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint, of all processes together: tensors, loader and random state, headers."""
    each, counts = state_bytes(config), parameters(config.model)
    weights = ((each.master or each.weights) + average_bytes(config)) * counts.total
    moments = moment_bytes(config, counts.total, counts.matrices)
    return weights + moments + config.world_size * CHECKPOINT_BYTES_PER_PROCESS


def export_bytes(config: Config) -> int:
    """Return the bytes that a milestone's export needs: weights in the checkpoint's number format.

    Without a copy (``EvalConfig.reads_checkpoints``) it has 0 bytes of weights.
    """
    if config.eval.reads_checkpoints:
        return 0
    each = state_bytes(config)
    stored = average_bytes(config) if config.eval.weights == "ema" else each.master or each.weights
    return parameters(config.model).total * stored


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


def memory_copies_bytes(config: Config) -> int:
    """Return the memory of a node that the copies of ``checkpoint.memory_every_steps`` need: its own, its partner's."""
    if config.checkpoint.memory_every_steps is None:
        return 0
    nodes = config.cluster.nodes
    return MEMORY_COPIES * min(2, nodes) * -(-checkpoint_bytes(config) // nodes)
