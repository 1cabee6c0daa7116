"""The LLaMA-family decoder and its layers, whole or one process's slice of each. No loss, no optimizer, no devices.

Initial weights are in ``trainer.init``.

Query, key and value are one linear layer, and so are gate and up: the same input, one larger product
(HLAT, arXiv 2404.10630, section 3.2). Their rows lie so that equal slices hold whole heads and matching parts of gate
and up, whatever the number of slices: a checkpoint does not depend on the tensor-parallel degree. The causal mask is
never a tensor.

Activations carry the precision: weights are cast to it where they are used, norms and rotations are done in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.schema import ModelConfig
from trainer.collectives import TensorParallel
from trainer.shared_heads import SharedHeads

#: By the end of a parameter's name, see :func:`cut_dim`; norms are not cut.
_CUT_DIM = {
    "embedding.weight": 0,
    "attention.qkv.weight": 0,
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
        """(..., in) to (..., out)."""
        return F.linear(input, self.weight.to(input.dtype))


class Parts:
    """What a model is put together from: plain layers, of which each process has its slice.

    Args:
        rank: which slice.
        slices: into how many the products are cut.
        heads: which key/value head the slice has, where several slices have copies of one.
    """

    def __init__(self, rank: int = 0, slices: int = 1, heads: SharedHeads | None = None) -> None:
        self.rank, self.slices, self.heads = rank, slices, heads

    def embedding(self, entries: int, width: int) -> nn.Module:
        """Token ids (batch, seq) to (batch, seq, width), cut by entries."""
        return nn.Embedding(entries // self.slices, width)

    def column_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """A product without bias that is cut by its outputs."""
        return Linear(in_features, out_features // self.slices)

    def row_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """A product without bias that is cut by its inputs."""
        return Linear(in_features // self.slices, out_features)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention of (batch, head, seq, head_dim), or where a mask is true; k and v may have fewer heads."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] > k.shape[1]
        )

    def recomputed(self, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        """The function's value; what it computes on the way is not kept for the backward pass, but computed again."""
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm, computed in FP32 and given in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same shape."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings.

    The rows of ``qkv`` are one group after another, a group being the query heads that share a key/value head, then
    that key head and that value head. Where there are more slices than groups, each slice has a group made of some
    of those query heads and copies of the other two (``trainer.shared_heads``).
    """

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        groups = max(config.num_kv_heads, parts.slices)
        self.queries_per_group = config.num_heads // groups
        self.head_dim = config.head_dim
        rows = groups * (self.queries_per_group + 2) * self.head_dim
        self.qkv = parts.column_parallel(config.hidden_size, rows)
        self.o = parts.row_parallel(config.num_heads * self.head_dim, config.hidden_size)
        self.recompute_core = False
        """Keep no intermediate result of the attention's core for the backward pass, but compute it again."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, seq, hidden) to the same shape; with a mask (batch, 1, seq, seq), attend where it is true."""
        groups = self.qkv(x).unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        if self.recompute_core and torch.is_grad_enabled():
            out = self.parts.recomputed(self._core, groups, cos, sin, mask)
        else:
            out = self._core(groups, cos, sin, mask)
        return self.o(out)  # type: ignore[no-any-return]

    def _core(self, groups: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Groups of heads (batch, seq, group, head, head_dim) to what they attend to (batch, seq, all heads)."""
        q, k, v = torch.split(groups, [self.queries_per_group, 1, 1], dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        out = self.parts.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
        return out.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU. The rows of ``gate_up`` are blocks of gate and up in turn, :func:`mlp_blocks` of each."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.block_rows = config.intermediate_size // mlp_blocks(config)
        self.gate_up = parts.column_parallel(config.hidden_size, 2 * config.intermediate_size)
        self.down = parts.row_parallel(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2, self.block_rows)).unbind(-2)
        # Contiguous first: then SiLU takes the same vector path as in other implementations, to the last bit.
        return self.down(F.silu(gate.flatten(-2)) * up.flatten(-2))  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """The tables of the rotary embedding; asked for by each layer, so that no pipeline stage gets them from another."""

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self._shape = seq_len, head_dim, theta
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines (seq, head_dim)."""
        return self.get_buffer("cos"), self.get_buffer("sin")

    def fill(self) -> None:
        """Write the tables where there was only memory for them."""
        for name, table in zip(("cos", "sin"), rotary_tables(*self._shape), strict=True):
            self.get_buffer(name).copy_(table)


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, parts: Parts, tp: TensorParallel | None) -> None:
        super().__init__()
        self.parts, self.tp = parts, tp
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, parts)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, parts)
        self.recompute = False
        """Keep only the layer's input for the backward pass and compute the rest again."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        if self.recompute and torch.is_grad_enabled():
            return self.parts.recomputed(self._layer, x, cos, sin, mask)
        return self._layer(x, cos, sin, mask)

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        if self.tp is None:
            x = x + self.attention(self.attention_norm(x), cos, sin, mask)
            return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]
        x = x + self.tp.leave(self.attention(self.tp.enter(self.attention_norm(x)), cos, sin, mask))
        return x + self.tp.leave(self.mlp(self.tp.enter(self.mlp_norm(x))))


class Llama(nn.Module):
    """The decoder, or the part of it that a pipeline stage holds.

    Parts have the names they have in the whole model, and a part that a stage does not hold is None.

    Args:
        config: the shape.
        seq_len: longest sequence, in tokens.
        layers: which layers to hold, 0-based; none given: all. The first brings the embedding with it, the last the
            final norm and the head.
        compute_dtype: of the activations.
        tp: the processes that have each layer together; none: this one has them whole.
        document_end_id: attend only within documents, which end with this token; none: to everything before.
        parts: a library's layers, which talk to other processes themselves (then no ``tp``); none: plain ones.
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
        self.layers = nn.ModuleDict({str(index): Layer(config, self.parts, tp) for index in layers})
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if self.is_last else None
        untied = self.is_last and not config.tie_embeddings
        self.head = self.parts.column_parallel(hidden, vocab) if untied else None
        self.rotary = Rotary(seq_len, config.head_dim, config.rope_theta)

    def blocks(self) -> Iterator[Layer]:
        """The layers held, in order."""
        return (block for block in self.layers.values() if isinstance(block, Layer))

    @property
    def output_weight(self) -> Tensor:
        """What turns the last stage's hidden states into logits: (vocabulary, hidden) of the head or the embedding."""
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "only the last pipeline stage makes logits"
        return owner.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (batch, seq), or the stage before's output, to hidden states (batch, seq, hidden).

        Those of the last stage are normalised: they are what ``output_weight`` reads.
        """
        mask = None
        if self.embedding is not None:
            if self.document_end_id is not None:
                mask = within_documents(x, self.document_end_id)
            x = self._embed(self.embedding, x)
        for layer in self.blocks():
            tables = self.rotary()
            x = layer(x, tables[0], tables[1], mask)
        return x if self.norm is None else self.norm(x)

    def _embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        """Token ids (batch, seq) to (batch, seq, hidden); with tensor parallelism each process knows some of them."""
        if self.tp is None:
            return embedding(tokens).to(self.compute_dtype)  # type: ignore[no-any-return]
        entries = embedding.get_parameter("weight").shape[0]
        tokens = tokens - self.tp.rank * entries
        known = (tokens >= 0) & (tokens < entries)
        found = embedding(tokens.clamp(0, entries - 1)) * known[..., None]
        return self.tp.leave(found.to(self.compute_dtype))


def cut_dim(name: str) -> int | None:
    """The dimension along which tensor-parallel processes cut a parameter; none: each has all of it."""
    return next((dim for end, dim in _CUT_DIM.items() if name.endswith(end)), None)


def mlp_blocks(config: ModelConfig) -> int:
    """Into how many blocks the rows of gate and of up are cut.

    A tensor-parallel degree divides the heads and the intermediate size, so it divides this.
    """
    return math.gcd(config.num_heads, config.intermediate_size)


def within_documents(tokens: Tensor, end_id: int) -> Tensor:
    """Token ids (batch, seq) to who may attend to whom (batch, 1, seq, seq): what is not later, in the same document.

    A document's end belongs to it.
    """
    ends = (tokens == end_id).long()
    document = ends.cumsum(-1) - ends
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=tokens.device).tril()


def rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seq, head_dim) of the rotary embedding, halves repeated (RoFormer, arXiv 2104.09864)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, seq, head_dim), in FP32."""
    seq = x.shape[-2]
    exact = x.float()
    first, second = exact.chunk(2, dim=-1)
    return (exact * cos[:seq] + torch.cat((-second, first), dim=-1) * sin[:seq]).to(x.dtype)
