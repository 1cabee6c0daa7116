"""Attention and its masks, with and without context parallelism.

A mask is made once per micro-batch, for all layers. Without documents and without context parallelism no mask is
needed: attention is causal. Otherwise, where the device has FlexAttention, the mask lists which blocks of 128 x 128
tokens are skipped, computed in full, or computed token by token; its size is proportional to the number of blocks.
Elsewhere it is a dense tensor of queries x keys.

With context parallelism, each process of a group has parts of each sequence. A sequence is cut into twice as many
chunks as there are processes. A process has one chunk from the front and the mirrored one from the back, so all do the
same work although attention is causal. Before attention, keys and values of the whole sequence are gathered (Llama 3,
arXiv 2407.21783, section 3.3.2); everything else needs only a process's own tokens. The weights are replicated, as over
data-parallel processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.parallel.tensor import gathered, scattered

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


#: Tokens of a block. FlexAttention's kernels need a multiple of their own tiles; this is PyTorch's default.
BLOCK = 128

Mask = Tensor | BlockMask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Compute attention of (batch, head, seq, head_dim), causal or by the mask.

    Args:
        q: queries.
        k: keys, with as many heads or fewer, which are then shared; may have more tokens than queries.
        v: values.
        mask: from :func:`make_mask`; None: causal. Compile the caller of a BlockMask, or all scores are in memory.
    """
    grouped = q.shape[1] > k.shape[1]
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def document_numbers(tokens: Tensor, end_id: int) -> Tensor:
    """Return the document number of each token (batch, seq); the end token is a document's last token."""
    ends = (tokens == end_id).long()
    return ends.cumsum(-1) - ends


def make_mask(documents: Tensor, positions: Tensor, *, blocks: bool) -> Mask:
    """Return the causal mask within documents.

    Args:
        documents: numbers of all tokens' documents (batch, seq), ascending in each sequence.
        positions: the queries' positions in the sequence (queries), ascending.
        blocks: return a BlockMask, otherwise a dense mask (batch, 1, queries, seq).
    """
    own = documents[:, positions]
    if blocks:
        return _block_mask(documents, positions, own)
    keys = torch.arange(documents.shape[1], device=documents.device)
    return (own[:, None, :, None] == documents[:, None, None, :]) & (positions[:, None] >= keys)


def _block_mask(documents: Tensor, positions: Tensor, own: Tensor) -> BlockMask:
    """Find the blocks from the first and last token of each.

    ``create_block_mask`` would evaluate all pairs of tokens, or compile another kernel. A block listed needlessly
    only costs time, because its pairs are tested; a block that counts as full must be full.
    """
    keys = torch.arange(documents.shape[1], device=documents.device)
    first_key, last_key = _ends(keys)
    first_query, last_query = _ends(positions)
    first_document, last_document = (ends[:, None, :] for ends in _ends(documents))
    first_own, last_own = (ends[:, :, None] for ends in _ends(own))
    used = (first_key <= last_query[:, None]) & (last_document >= first_own)
    full = (last_key <= first_query[:, None]) & (first_document == last_own) & (first_own == last_document)
    full &= _complete(positions)[:, None] & _complete(keys)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (positions[query] >= key) & (own[batch, query] == documents[batch, key])

    return BlockMask.from_kv_blocks(
        *_listed(used & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(positions), len(keys)),
    )


def _ends(ascending: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last entry of each block of (..., tokens): (..., blocks) each."""
    tokens = ascending.shape[-1]
    starts = torch.arange(0, tokens, BLOCK, device=ascending.device)
    return ascending[..., starts], ascending[..., (starts + BLOCK - 1).clamp_max(tokens - 1)]


def _complete(tokens: Tensor) -> Tensor:
    """Return whether each block of (tokens) is complete; only the last one may be shorter."""
    starts = torch.arange(0, len(tokens), BLOCK, device=tokens.device)
    return starts + BLOCK <= len(tokens)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Map booleans (batch, query block, key block) to the counts of true ones, and to indices with those first."""
    order = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


#: The divided dimension of (keys and values, batch, head, seq, head_dim).
_SEQUENCE = 3


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """A context-parallel group."""

    group: ProcessGroup
    rank: int
    size: int

    def own(self, x: Tensor) -> Tensor:
        """Return this process's chunks of (batch, seq), as (batch, seq / size)."""
        chunks = x.chunk(2 * self.size, dim=1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=1)

    def positions(self, seq_len: int, device: torch.device) -> Tensor:
        """Return the positions of this process's tokens in the sequence (seq / size)."""
        return self.own(torch.arange(seq_len, device=device)[None])[0]

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return all processes' keys and values (batch, head, seq, head_dim), in the order of the sequence."""
        both = _Gather.apply(torch.stack((k, v)), self.group.group_name, self.size)  # type: ignore[no-untyped-call]
        return both[0], both[1]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        halves = [part.chunk(2, dim=_SEQUENCE) for part in gathered(both, group).chunk(size)]
        return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], dim=_SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        chunks = gradients[0].chunk(2 * ctx.size, dim=_SEQUENCE)
        parts = [torch.cat((chunks[rank], chunks[-1 - rank]), dim=_SEQUENCE) for rank in range(ctx.size)]
        return scattered(torch.cat(parts), ctx.group), None, None
