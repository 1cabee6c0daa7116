"""The decoder (LLaMA, Qwen 3, OLMo 2) and its layers, whole or sliced. ``trainer.init`` sets the initial weights.

Query, key and value are one linear layer, and so are gate and up: one larger product with the same input
(HLAT, arXiv 2404.10630, section 3.2). Their rows are ordered so that equal slices hold whole heads and matching parts
of gate and up for any number of slices. So a checkpoint doesn't depend on the tensor-parallel degree.
``trainer.attention`` has attention and its masks.

Weights are cast to the activations' dtype where they are used. Norms and rotations use FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.schema import ModelConfig
from trainer.attention import Mask, attend, document_numbers, make_mask
from trainer.collectives import TensorParallel
from trainer.context_parallel import ContextParallel
from trainer.norms import QueryKeyNorms, RMSNorm
from trainer.recompute import recomputed_by_operator
from trainer.rotary import Rotary, rotate
from trainer.shared_heads import SharedHeads

#: The sharded dimension by the end of a parameter's name, see :func:`slice_dim`; other norms are not sharded.
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
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear
        """Of the input (..., in) and the weight (out, in)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """(..., in) to (..., out)."""
        return self.product(input, self.weight.to(input.dtype))


class Parts:
    """The layers that a model is built from; here plain ones, of which each process has its slice.

    Args:
        rank: which slice.
        slices: number of slices.
        heads: which heads the slice has, if several slices share a key/value head.
        cp: the context-parallel group; None: each process has whole sequences.
    """

    def __init__(
        self, rank: int = 0, slices: int = 1, heads: SharedHeads | None = None, cp: ContextParallel | None = None
    ) -> None:
        self.rank, self.slices, self.heads, self.cp = rank, slices, heads, cp

    def embedding(self, entries: int, width: int) -> nn.Module:
        """Token ids (batch, seq) to (batch, seq, width), sharded by entries."""
        return nn.Embedding(entries // self.slices, width)

    def column_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer without bias, sharded by outputs."""
        return Linear(in_features, out_features // self.slices)

    def row_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer without bias, sharded by inputs."""
        return Linear(in_features // self.slices, out_features)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """Attention of (batch, head, seq, head_dim), causal or as the mask says; k and v may have fewer heads."""
        if self.cp is not None:
            k, v = self.cp.gather(k, v)
        return attend(q, k, v, mask)

    def recomputed(self, function: Callable[..., Tensor], *args: Mask | None) -> Tensor:
        """Call the function; its intermediate results are recomputed in the backward pass."""
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings, and norms of queries and keys if the model has them.

    The rows of ``qkv`` are groups: the query heads that share a key/value head, then that key head and that value head.
    If there are more slices than groups, each slice has some of a group's query heads and replicas of the other two
    (``trainer.shared_heads``).
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        groups = self.qkv(x).unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        if self.recompute_core and torch.is_grad_enabled():
            out = self.parts.recomputed(self._core, groups, cos, sin, mask)
        else:
            out = self._core(groups, cos, sin, mask)
        return self.o(out)  # type: ignore[no-any-return]

    def _core(self, groups: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        """Groups of heads (batch, seq, group, head, head_dim) to attention outputs (batch, seq, all heads)."""
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
        """(batch, seq, hidden) to the same shape."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2, self.block_rows)).unbind(-2)
        # Contiguous, so that SiLU uses the same vector path as other implementations, with equal bits.
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
        self.recompute_operators = False
        """Keep what ``trainer.recompute`` lists and recompute the rest."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        if self.recompute_operators and torch.is_grad_enabled():
            return recomputed_by_operator(self._layer, x, cos, sin, mask)
        if self.recompute and torch.is_grad_enabled():
            return self.parts.recomputed(self._layer, x, cos, sin, mask)
        return self._layer(x, cos, sin, mask)

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        if self.norms_outputs:
            x = x + self.attention_norm(self._attend(x, cos, sin, mask))
            return x + self.mlp_norm(self._feed_forward(x))  # type: ignore[no-any-return]
        x = x + self._attend(self.attention_norm(x), cos, sin, mask)
        return x + self._feed_forward(self.mlp_norm(x))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        if self.tp is None:
            return self.attention(x, cos, sin, mask)  # type: ignore[no-any-return]
        return self.tp.leave(self.attention(self.tp.enter(x), cos, sin, mask))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if self.tp is None else self.tp.leave(self.mlp(self.tp.enter(x)))


class Llama(nn.Module):
    """The decoder, or a pipeline stage of it.

    Parameters have the same names in a stage as in the whole model. Modules of other stages are None.

    Args:
        config: the shape.
        seq_len: longest sequence, in tokens.
        layers: of the process, from 0, ascending; None: all. The process of the first layer has the embedding, that of
            the last one the final norm and the head.
        compute_dtype: of the activations.
        tp: the tensor-parallel group; None: layers are whole.
        cp: the context-parallel group; None: each process has whole sequences.
        document_end_id: attend only within documents, which end with this token; None: attend across documents.
        parts: a library's layers, which do their own communication (without ``tp`` and ``cp``); None: plain layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        *,
        layers: Sequence[int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
        cp: ContextParallel | None = None,
        document_end_id: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts or (Parts(tp.rank, tp.size, cp=cp) if tp else Parts(cp=cp))
        self.seq_len, self.cp = seq_len, cp
        layers = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = 0 in layers, config.num_layers - 1 in layers
        self.compute_dtype, self.tp, self.document_end_id = compute_dtype, tp, document_end_id
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = self.parts.embedding(vocab, hidden) if self.is_first else None
        self.layer_numbers = list(layers)
        self.layers = nn.ModuleDict({str(number): Layer(config, self.parts, tp) for number in layers})
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if self.is_last else None
        untied = self.is_last and not config.tie_embeddings
        self.head = self.parts.column_parallel(hidden, vocab) if untied else None
        self.rotary = Rotary(seq_len, config)
        self.uses_flex_attention = False
        """Masks are BlockMasks; for compiled layers on a device that has FlexAttention."""

    def blocks(self) -> Iterator[Layer]:
        """Return the stage's layers in order."""
        return (block for block in self.layers.values() if isinstance(block, Layer))

    @property
    def output_weight(self) -> Tensor:
        """The output projection (vocabulary, hidden): the weight of the head, or of a tied embedding."""
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "only the last pipeline stage computes logits"
        return owner.get_parameter("weight")

    def forward(self, x: Tensor, tokens: Tensor | None = None, *, layers: Sequence[int] | None = None) -> Tensor:
        """Token ids (batch, seq), or the previous stage's output, to hidden states (batch, seq, hidden).

        The last stage normalizes them for ``output_weight``. With context parallelism the ids are those of the whole
        sequence, and hidden states those of this process's tokens.

        Args:
            x: the input.
            tokens: the token ids, for a later stage with ``document_end_id``.
            layers: numbers of those to compute, of this process's; None: all of them.
        """
        layers = self.layer_numbers if layers is None else layers
        if self.embedding is not None and 0 in layers:
            tokens = x
            x = self._embed(self.embedding, x if self.cp is None else self.cp.own(x))
        positions = None if self.cp is None else self.cp.positions(self.seq_len, x.device)
        mask = self._mask(x, tokens, positions)
        own = None if positions is None else [table[positions] for table in self.rotary()]
        for number in layers:
            tables = self.rotary() if own is None else own
            x = self.layers[str(number)](x, tables[0], tables[1], mask)
        return self.norm(x) if self.norm is not None and self.layer_numbers[-1] in layers else x

    def _mask(self, x: Tensor, tokens: Tensor | None, positions: Tensor | None) -> Mask | None:
        """Return the mask of sequences, of which this process has the tokens at some positions, or all."""
        if self.document_end_id is not None:
            assert tokens is not None, "a mask within documents needs the tokens"
            documents = document_numbers(tokens, self.document_end_id)
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
        elif positions is not None:
            documents = positions.new_zeros(x.shape[0], self.seq_len)
        else:
            return None
        return make_mask(documents, positions, blocks=self.uses_flex_attention)

    def _embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        """Token ids (batch, seq) to (batch, seq, hidden), with tensor parallelism summed over all processes."""
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
    """Return whether a parameter is one norm for all heads, of which tensor-parallel processes have different ones."""
    return name.endswith("_head_norm.weight")


def mlp_blocks(config: ModelConfig) -> int:
    """Return the number of blocks of gate's rows, and of up's.

    Every tensor-parallel degree divides it, because a degree divides the heads and the intermediate size.
    """
    return math.gcd(config.num_heads, config.intermediate_size)
