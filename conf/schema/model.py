"""The model: its shape, how it is split over processes, and its number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from conf.constraints import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range

PrecisionName = Literal["fp32", "mixed", "fp8", "bf16_sr", "bf16"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, SwiGLU, rotary embeddings and no biases: LLaMA, Qwen 3, OLMo 2 or DeepSeek-V3."""

    name: str = "llama_tiny"
    """Label of the shape; no effect."""
    module: str | None = None
    """torchtitan's module of the model, such as `gpt_oss`, or `package.module` of another package; none: the shape of
    the other keys."""
    flavor: str | None = None
    """Name of a model in `model.module`, such as `20b`."""
    total_parameters: PositiveInt | None = None
    """Parameters of `model.flavor`; none: torchtitan counts them, where it is installed."""
    active_parameters: PositiveInt | None = None
    """Parameters of `model.flavor` that one token uses; none: as `total_parameters`."""
    flops_per_token: PositiveInt | None = None
    """FLOPs of one token's forward and backward pass in `model.flavor`, without attention's scores; none: torchtitan
    counts them, where it is installed, otherwise 6 x `active_parameters`."""
    score_flops_per_token: NonNegativeInt = 0
    """FLOPs of one token's attention scores in `model.flavor`, for each token of `train.seq_len`."""
    vocab_size: PositiveInt = 8192
    """Rows of the embedding; at least the size of the tokenizer's vocabulary."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 352
    """Width of the feed-forward layer."""
    num_layers: PositiveInt = 4
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Query heads of a layer."""
    num_kv_heads: PositiveInt = 4
    """Key/value heads; fewer than num_heads is grouped-query attention."""
    head_dim: PositiveInt | None = None
    """Width of one attention head; none: hidden_size / num_heads."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: `none`, `head` (of each head by itself; Qwen 3) or `all` (all heads; OLMo 2)."""
    norm_position: Literal["pre", "post"] = "pre"
    """A layer's norms: `pre` (inputs of attention and feed-forward) or `post` (their outputs; OLMo 2)."""
    num_experts: NonNegativeInt = 0
    """Experts of a layer, a mixture of experts; 0: every layer is dense."""
    experts_per_token: PositiveInt = 8
    """Experts that the router chooses for a token."""
    expert_intermediate_size: PositiveInt | None = None
    """Width of an expert; none: intermediate_size."""
    num_shared_experts: NonNegativeInt = 0
    """Experts that every token uses, in addition to the chosen ones."""
    num_dense_layers: NonNegativeInt = 0
    """First layers that have a feed-forward layer instead of experts."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's products into scores."""
    normalize_router_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    router_scale: PositiveFloat = 1.0
    """Factor of the weights of a token's experts."""
    router_groups: PositiveInt | None = None
    """Groups of experts of which the router first chooses `router_limited_groups`; none: no groups."""
    router_limited_groups: PositiveInt | None = None
    """Groups that a token's experts come from."""
    kv_lora_rank: PositiveInt | None = None
    """Width of the compressed keys and values (multi-head latent attention); none: grouped-query attention."""
    q_lora_rank: PositiveInt | None = None
    """Width of the compressed queries (multi-head latent attention); none: not compressed."""
    qk_nope_head_dim: PositiveInt = 128
    """Latent attention: width of a head's queries and keys that have no position."""
    qk_rope_head_dim: PositiveInt = 64
    """Latent attention: width of a head's queries and keys that are rotated."""
    v_head_dim: PositiveInt = 128
    """Latent attention: width of a head's values."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary embeddings' frequencies."""
    rope_scaling: Literal["none", "llama3", "yarn"] = "none"
    """Lower the rotary embeddings' low frequencies for longer sequences: `none`, `llama3` (Llama 3.1 and later) or
    `yarn` (OLMo 3, DeepSeek-V3), which also makes attention sharper."""
    rope_scaling_factor: Annotated[float, Range(ge=1)] = 8.0
    """Divisor of the low frequencies (rope_scaling=llama3 and yarn)."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """Frequencies with fewer turns than this in rope_original_seq_len tokens are divided in full
    (rope_scaling=llama3)."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """Frequencies with more turns than this in rope_original_seq_len tokens are not changed (rope_scaling=llama3)."""
    rope_beta_slow: PositiveFloat = 1.0
    """The same as rope_low_freq_factor for rope_scaling=yarn."""
    rope_beta_fast: PositiveFloat = 32.0
    """The same as rope_high_freq_factor for rope_scaling=yarn."""
    rope_original_seq_len: PositiveInt = 8192
    """Tokens per sequence before the extension (rope_scaling=llama3 and yarn)."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square before its root."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection."""
    initializer_range: NonNegativeFloat = 0.021
    """Standard deviation of the initial weights (HLAT's scripts)."""
    scaled_initialization: bool = True
    """Divide the initial weights of both output projections of layer l by sqrt(2 l) (HLAT)."""
    mup_base_width: PositiveInt | None = None
    """Maximal update parametrization (muP): the `hidden_size` at which `optimizer.lr` and `initializer_range` hold. At
    other widths, the initial weights and learning rates of layers and output projection follow from it, so one learning
    rate suits all widths. None: they don't depend on the width."""

    @property
    def head_width(self) -> int:
        """Width of one head's queries and keys."""
        if self.kv_lora_rank is not None:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_width(self) -> int:
        """Width of a layer's query heads together."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of a layer's key heads together, and without latent attention of its value heads."""
        return self.num_kv_heads * self.head_width

    @property
    def output_width(self) -> int:
        """Width of the results of a layer's heads together."""
        return self.query_width if self.kv_lora_rank is None else self.num_heads * self.v_head_dim

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.expert_intermediate_size or self.intermediate_size

    @property
    def shared_width(self) -> int:
        """Width of a mixture's shared experts together."""
        return self.num_shared_experts * self.expert_width

    @property
    def width_factor(self) -> float:
        """The width as a multiple of `mup_base_width`; 1 without muP."""
        return self.hidden_size / (self.mup_base_width or self.hidden_size)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer (0-based) has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    name: PrecisionName = "fp32"
    """`fp32`; `mixed`: BF16 products, everything else FP32; `fp8`: the same with FP8 products in layers (backend
    torchtitan); `bf16_sr`: BF16 weights and moments with stochastic rounding; `bf16`: the same with rounding to
    nearest."""
    fp8_scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    """Scales of `fp8`: one for each row of a matrix, or one for each matrix, which is faster and less precise. With
    `tensorwise`, FSDP gathers the weights in FP8."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is split over processes; the remaining factor of the world size is data parallel."""

    data_parallel: Literal["replicate", "zero1", "fsdp"] = "replicate"
    """`replicate`: full replicas; `zero1`: shard master weights and moments over the replicas, and exchange weights and
    gradients once per step; `fsdp`: shard parameters, gradients and moments (ZeRO-3)."""
    fsdp_size: PositiveInt | None = None
    """Replicas that share one sharded copy (`fsdp`, `zero1`), such as those of a node: hybrid sharding; none: all.
    Context-parallel processes count, too."""
    reshard_after_forward: Literal["always", "never"] = "always"
    """When `fsdp` frees a layer's gathered weights: `always` after its forward pass, or `never` within a step, which
    needs the memory of all weights but gathers them once."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share each layer."""
    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel processes between a layer's products."""
    pipeline_parallel_size: PositiveInt = 1
    """Processes that the layers are divided over, each with a stage of them, or several."""
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    """Order of the micro-batches: `1f1b`, or `interleaved_1f1b`, in which a process has `pipeline_chunks` stages: it
    waits less, but sends more and keeps more activations (backend torchtitan)."""
    pipeline_chunks: Annotated[int, Range(ge=2)] = 2
    """Stages of each process with `interleaved_1f1b`."""
    context_parallel_size: PositiveInt = 1
    """Processes that share each sequence, for long ones (backend torchtitan). Each has `train.seq_len` / this many
    tokens of it; attention gathers the keys and values of all."""
    expert_parallel_size: PositiveInt = 1
    """Processes that share the experts of a mixture; they are among the data-, context- and tensor-parallel ones
    (backend torchtitan)."""
    activation_checkpointing: Literal["none", "selective", "operators", "budget", "full"] = "none"
    """What the backward pass recomputes: `none`, `selective` (core attention), `operators` (a layer's cheap operators
    and every second matrix product; torchtitan's default, which it calls selective), `budget` (what
    `activation_memory_budget` leaves no room for) or `full`. Of these, `operators` and `budget` need backend
    torchtitan."""
    activation_memory_budget: Fraction = 0.5
    """Share of a compiled layer's activations that `budget` keeps; 0 keeps only its input, like `full`."""
