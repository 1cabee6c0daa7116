"""The decoder (LLaMA, Qwen 3, OLMo 2) and its layers, whole or sliced.

Query, key and value are one linear layer, and so are gate and up: one larger product with the same input
(HLAT, arXiv 2404.10630, section 3.2). Their rows are ordered so that equal slices hold whole heads and matching parts
of gate and up for any number of slices. So a checkpoint doesn't depend on the tensor-parallel degree.

Weights are cast to the activations' dtype where they are used. Norms and rotations use FP32.

Attention is causal. Within documents it needs a mask, a dense tensor that is made once per micro-batch for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.schema import ModelConfig
from trainer.parallel.tensor import SharedHeads, TensorParallel


class Rotary(nn.Module):
    """The tables of the rotary embedding. Each layer reads them here, so pipeline stages don't exchange them."""

    def __init__(self, seq_len: int, model: ModelConfig) -> None:
        super().__init__()
        self._shape = seq_len, model
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq_len, model.head_width), persistent=False)
        if not self.get_buffer("cos").is_meta:
            self.fill()

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (seq, head_dim)."""
        return self.get_buffer("cos"), self.get_buffer("sin")

    def fill(self) -> None:
        """Fill the tables after a model on the meta device has been allocated."""
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.get_buffer(name).copy_(table)


def rotary_tables(seq_len: int, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (seq, head_dim), with two equal halves (RoFormer, arXiv 2104.09864)."""
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies(model))
    angles = torch.cat((angles, angles), dim=-1)
    scale = _SCALINGS[model.rope_scaling][1](model)
    return angles.cos() * scale, angles.sin() * scale


def frequencies(model: ModelConfig) -> Tensor:
    """Return the rotations' frequencies in radians per token, FP32 (head_dim / 2), from high to low."""
    plain = 1.0 / model.rope_theta ** (torch.arange(0, model.head_width, 2, dtype=torch.float32) / model.head_width)
    return _SCALINGS[model.rope_scaling][0](plain, model)


def scaled_like_llama3(plain: Tensor, model: ModelConfig) -> Tensor:
    """Return the frequencies for longer sequences, as Llama 3.1's reference code (``apply_scaling``) computes them.

    High frequencies stay, low ones are divided by ``rope_scaling_factor``, and those between are interpolated by their
    number of turns in ``rope_original_seq_len`` tokens.
    """
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    turns = model.rope_original_seq_len / (2 * math.pi / plain)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / model.rope_scaling_factor + kept * plain


def scaled_like_yarn(plain: Tensor, model: ModelConfig) -> Tensor:
    """Return the frequencies for longer sequences by YaRN (arXiv 2309.00071, "NTK-by-parts"), as transformers does.

    High frequencies stay, low ones are divided by ``rope_scaling_factor``. Those between are interpolated by their
    place in the table, as in the authors' code; the paper interpolates by the number of turns.
    """
    width, original = model.head_width, model.rope_original_seq_len

    def place(turns: float) -> float:
        """Return the place of the frequency that turns so often in ``rope_original_seq_len`` tokens."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first, last = (
        max(math.floor(place(model.rope_beta_fast)), 0),
        min(math.ceil(place(model.rope_beta_slow)), width - 1),
    )
    ramp = (torch.arange(len(plain), dtype=torch.float32) - first) / (last - first or 0.001)
    divided = ramp.clamp(0.0, 1.0)
    return (1 - divided) * plain + divided * plain / model.rope_scaling_factor


def yarn_scale(model: ModelConfig) -> float:
    """Return the factor of queries and keys, whose square divides the temperature of attention (arXiv 2309.00071)."""
    return 0.1 * math.log(model.rope_scaling_factor) + 1.0


#: By ``model.rope_scaling``: the frequencies, and the factor of rotated queries and keys.
_SCALINGS: dict[str, tuple[Callable[[Tensor, ModelConfig], Tensor], Callable[[ModelConfig], float]]] = {
    "none": (lambda plain, _: plain, lambda _: 1.0),
    "llama3": (scaled_like_llama3, lambda _: 1.0),
    "yarn": (scaled_like_yarn, yarn_scale),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, seq, head_dim), in FP32.

    A compiler writes tensors to memory before it joins them, forward or backward. So each half is converted alone.
    """
    (cos1, cos2), (sin1, sin2) = (table[: x.shape[-2]].chunk(2, dim=-1) for table in (cos, sin))
    first, second = (half.float() for half in x.chunk(2, dim=-1))
    rotated = first * cos1 - second * sin1, second * cos2 + first * sin2
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)


def document_mask(tokens: Tensor, end_id: int) -> Tensor:
    """Return the causal mask within documents (batch, 1, seq, seq) of token ids; a document ends with ``end_id``."""
    ends = (tokens == end_id).long()
    documents = ends.cumsum(-1) - ends
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return (documents[:, None, :, None] == documents[:, None, None, :]) & (positions[:, None] >= positions)


class RMSNorm(nn.RMSNorm):
    """A norm over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (..., width), without changing the shape."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class SlicedRMSNorm(nn.Module):
    """A norm over a last dimension that is sliced over the tensor-parallel processes.

    ``width`` is that of the slice. The processes exchange one number per token.
    """

    def __init__(self, width: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._width, self._eps, self._tp = width * tp.size, eps, tp

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (..., width of the slice), without changing the shape."""
        exact = x.float()
        mean_square = self._tp.total(exact.square().sum(-1, keepdim=True)) / self._width
        return (exact * torch.rsqrt(mean_square + self._eps) * self.weight.float()).to(x.dtype)


class QueryKeyNorms(nn.Module):
    """The norms of queries and keys before their rotation; none if ``model.qk_norm`` is ``none``.

    The weights of ``head`` norms are shared by all heads, those of ``all`` norms are sharded like the heads
    (:func:`slice_dim` distinguishes them by name).

    Args:
        slices: number of tensor-parallel processes.
        tp: the tensor-parallel group; None if there is only one slice.
    """

    def __init__(self, config: ModelConfig, slices: int, tp: TensorParallel | None) -> None:
        super().__init__()
        self._of_heads, self._of_all = config.qk_norm == "head", config.qk_norm == "all"
        eps = config.rms_norm_eps
        if self._of_heads:
            self.q_head_norm, self.k_head_norm = (RMSNorm(config.head_width, eps=eps) for _ in range(2))
        if self._of_all:
            widths = (config.query_width // slices, config.kv_width // slices)
            self.q_norm, self.k_norm = (
                RMSNorm(width, eps=eps) if tp is None else SlicedRMSNorm(width, eps, tp) for width in widths
            )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys (batch, seq, head, head_dim), without changing the shapes."""
        if self._of_heads:
            return self.q_head_norm(q), self.k_head_norm(k)
        if self._of_all:
            return self.q_norm(q.flatten(2)).view(q.shape), self.k_norm(k.flatten(2)).view(k.shape)
        return q, k


#: The sharded dimension by a parameter name's suffix, see :func:`slice_dim`; other norms are not sharded.
_SLICE_DIM = {
    "embedding.weight": 0,
    "attention.qkv.weight": 0,
    "attention.norms.q_norm.weight": 0,
    "attention.norms.k_norm.weight": 0,
    "attention.o.weight": 1,
    "mlp.gate_up.weight": 0,
    "mlp.down.weight": 1,
    "head.weight": 0,
}


class Linear(nn.Linear):
    """A linear layer without bias that computes in the precision of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Map (..., in) to (..., out)."""
        return F.linear(input, self.weight.to(input.dtype))


class Output(Linear):
    """The output projection of a model whose loss includes the projection (``trainer.model.loss``) and uses the weight.

    It is called for its hooks: FSDP gathers and frees the weight with the modules of the end of the model.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Return the hidden states unchanged."""
        return input


class StepNumbers:
    """Further numbers of a step, such as ``router_entropy``: means of the values that all processes add in the step.

    A layer adds its value with ``self.parts.numbers.add``, in every micro-batch, and a backend can do so too. The first
    step of an attempt decides which numbers there are; one that is first added later is left out.
    """

    def __init__(self) -> None:
        #: Sum and number of the values by name. The number is data too: compiled layers are specialized for integers.
        self._added: dict[str, Tensor] = {}
        self._names: list[str] | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Add a value, a tensor with one element. Nothing waits for the device."""
        value = value.detach().float().reshape(1)
        one = torch.cat((value, torch.ones_like(value)))
        self._added[name] = self._added[name] + one if name in self._added else one

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Forget what is added in this block."""
        added, self._added = self._added, {}
        try:
            yield
        finally:
            self._added = added

    def take(self, gather: Callable[[list[str]], list[list[str]]], like: Tensor) -> tuple[list[str], Tensor]:
        """End the step; return all processes' names, and this process's sum and count of each in turn, FP32.

        Args:
            gather: returns all processes' lists; called in the first step.
            like: a tensor on the device.
        """
        if self._names is None:
            self._names = sorted({name for names in gather(sorted(self._added)) for name in names})
        added, self._added = self._added, {}
        none = like.new_zeros(2, dtype=torch.float32)
        return self._names, torch.cat([none[:0], *(added.get(name, none) for name in self._names)])


class Parts:
    """Makes the layers of a model; these are plain layers, and each process has its slice.

    Args:
        rank: number of this process's slice.
        slices: number of slices.
        heads: which heads the slice has, if several slices share a key/value head.
    """

    def __init__(self, rank: int = 0, slices: int = 1, heads: SharedHeads | None = None) -> None:
        self.rank, self.slices, self.heads = rank, slices, heads
        self.numbers = StepNumbers()

    def embedding(self, entries: int, width: int) -> nn.Module:
        """Return an embedding from ids (batch, seq) to (batch, seq, width), sharded by entries."""
        entries //= self.slices
        weight = torch.empty(entries, width)
        if not weight.is_meta:  # PyTorch imports its compiler to draw numbers without values
            nn.init.normal_(weight)
        return nn.Embedding(entries, width, _weight=weight)

    def column_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """Return a linear layer without bias, sharded by outputs."""
        return Linear(in_features, out_features // self.slices)

    def row_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """Return a linear layer without bias, sharded by inputs."""
        return Linear(in_features // self.slices, out_features)

    def output(self, in_features: int, out_features: int) -> nn.Module:
        """Return the output projection, sharded by outputs; :meth:`Llama.forward` returns what it returns."""
        return Output(in_features, out_features // self.slices)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention of (batch, head, seq, head_dim), causal or by the mask; k and v may have fewer heads."""
        grouped = q.shape[1] > k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)

    def recomputed(self, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        """Call the function; the backward pass recomputes its intermediate results."""
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings, and norms of queries and keys if the model has them.

    The rows of ``qkv`` are groups: the query heads that share a key/value head, then that key head and that value head.
    If there are more slices than groups, each slice has some of a group's query heads and replicas of the other two
    (``trainer.parallel.tensor``).
    """

    def __init__(self, config: ModelConfig, parts: Parts, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.parts = parts
        groups = max(config.num_kv_heads, parts.slices)
        self.queries_per_group = config.num_heads // groups
        self.head_dim = config.head_width
        rows = groups * (self.queries_per_group + 2) * self.head_dim
        self.qkv = parts.column_parallel(config.hidden_size, rows)
        self.norms = QueryKeyNorms(config, parts.slices, tp)
        self.o = parts.row_parallel(config.query_width, config.hidden_size)
        self.recompute_core = False
        """Recompute the attention's core in the backward pass."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        groups = self.qkv(x).unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        if self.recompute_core and torch.is_grad_enabled():
            out = self.parts.recomputed(self._core, groups, cos, sin, mask)
        else:
            out = self._core(groups, cos, sin, mask)
        return self.o(out)  # type: ignore[no-any-return]

    def _core(self, groups: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map groups of heads (batch, seq, group, head, head_dim) to attention outputs (batch, seq, all heads)."""
        q, k, v = torch.split(groups, [self.queries_per_group, 1, 1], dim=3)
        q, k = self.norms(q.flatten(2, 3), k.flatten(2, 3))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v.flatten(2, 3)))
        out = self.parts.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
        return out.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU. The rows of ``gate_up`` alternate between blocks of gate and of up, :func:`mlp_blocks` of each."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.block_rows = config.intermediate_size // mlp_blocks(config)
        self.gate_up = parts.column_parallel(config.hidden_size, 2 * config.intermediate_size)
        self.down = parts.row_parallel(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2, self.block_rows)).unbind(-2)
        # Contiguous, so that SiLU takes the same vector path as in other implementations, with equal bits.
        return self.down(F.silu(gate.flatten(-2)) * up.flatten(-2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One decoder layer, with its norms before attention and feed-forward, or after them."""

    def __init__(self, config: ModelConfig, parts: Parts, tp: TensorParallel | None) -> None:
        super().__init__()
        self.parts, self.tp = parts, tp
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, parts, tp)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, parts)
        self.norms_outputs = config.norm_position == "post"
        self.recompute = False
        """Keep only the layer's input for the backward pass and recompute the rest."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        if self.recompute and torch.is_grad_enabled():
            return self.parts.recomputed(self._layer, x, cos, sin, mask)
        return self._layer(x, cos, sin, mask)

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        if self.norms_outputs:
            x = x + self.attention_norm(self._attend(x, cos, sin, mask))
            return x + self.mlp_norm(self._feed_forward(x))  # type: ignore[no-any-return]
        x = x + self._attend(self.attention_norm(x), cos, sin, mask)
        return x + self._feed_forward(self.mlp_norm(x))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        if self.tp is None:
            return self.attention(x, cos, sin, mask)  # type: ignore[no-any-return]
        return self.tp.leave(self.attention(self.tp.enter(x), cos, sin, mask))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if self.tp is None else self.tp.leave(self.mlp(self.tp.enter(x)))


class Llama(nn.Module):
    """The decoder, or a pipeline stage of it.

    Parameters have the same names in a stage as in the whole model. Modules of other stages are None.

    Args:
        config: the model's shape.
        seq_len: length of the longest sequence, in tokens.
        layers: numbers of the process's layers, from 0, ascending; None: all. The process with the first layer has the
            embedding, and the one with the last layer has the final norm and the head.
        compute_dtype: dtype of the activations.
        tp: the tensor-parallel group; None: layers are whole.
        document_end_id: attend only within documents, which end with this token; None: attend across documents.
        parts: a library's layers, which communicate themselves (without ``tp``); None: plain layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        *,
        layers: Sequence[int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
        document_end_id: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts or (Parts(tp.rank, tp.size) if tp else Parts())
        layers = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = 0 in layers, config.num_layers - 1 in layers
        self.compute_dtype, self.tp, self.document_end_id = compute_dtype, tp, document_end_id
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = self.parts.embedding(vocab, hidden) if self.is_first else None
        self.layers = nn.ModuleDict({str(number): Layer(config, self.parts, tp) for number in layers})
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if self.is_last else None
        untied = self.is_last and not config.tie_embeddings
        self.head = self.parts.output(hidden, vocab) if untied else None
        self.rotary = Rotary(seq_len, config)

    def blocks(self) -> Iterator[Layer]:
        """Return the stage's layers in order."""
        return (block for block in self.layers.values() if isinstance(block, Layer))

    @property
    def output_weight(self) -> Tensor:
        """The output projection (vocabulary, hidden): the weight of the head, or of a tied embedding."""
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "only the last pipeline stage computes logits"
        return owner.get_parameter("weight")

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map token ids (batch, seq), or the previous stage's output, to hidden states (batch, seq, hidden).

        The last stage normalizes them for ``output_weight``. With a library's layers it returns logits.

        Args:
            tokens: the token ids, for a later stage with ``document_end_id``.
        """
        if self.embedding is not None:
            tokens = x
            x = self._embed(self.embedding, x)
        mask = None
        if self.document_end_id is not None:
            assert tokens is not None, "a mask within documents needs the tokens"
            mask = document_mask(tokens, self.document_end_id)
        for layer in self.layers.values():
            tables = self.rotary()
            x = layer(x, tables[0], tables[1], mask)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x) if self.head is not None else x

    def _embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        """Map token ids (batch, seq) to (batch, seq, hidden), with tensor parallelism summed over all processes."""
        if self.tp is None:
            return embedding(tokens).to(self.compute_dtype)  # type: ignore[no-any-return]
        entries = embedding.get_parameter("weight").shape[0]
        tokens = tokens - self.tp.rank * entries
        own = (tokens >= 0) & (tokens < entries)
        embedded = embedding(tokens.clamp(0, entries - 1)) * own[..., None]
        return self.tp.leave(embedded.to(self.compute_dtype))


def slice_dim(name: str) -> int | None:
    """Return the dimension of a parameter that is sharded over tensor-parallel processes; None: not sharded."""
    return next((dim for end, dim in _SLICE_DIM.items() if name.endswith(end)), None)


def is_shared_by_heads(name: str) -> bool:
    """Return whether a parameter is one norm for all heads; tensor-parallel processes apply it to different heads."""
    return name.endswith("_head_norm.weight")


def mlp_blocks(config: ModelConfig) -> int:
    """Return the number of blocks of gate's rows, which is also that of up's.

    Every tensor-parallel degree divides it, because a degree divides the heads and the intermediate size.
    """
    return math.gcd(config.num_heads, config.intermediate_size)
