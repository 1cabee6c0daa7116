"""The layers of NeuronX Distributed from which the backend builds our model.

Weights keep our names and our order of rows, in which equal slices hold whole groups of heads and matching parts of
gate and up. So a slice is one block of rows (``stride=1``) for every tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.utils.model_utils import get_platform_lnc
from torch import Tensor, nn
from torch_xla.utils.checkpoint import checkpoint

from conf.schema import ParallelConfig
from trainer.model.decoder import Layer, Llama, Parts, RMSNorm, Rotary
from trainer.parallel.tensor import SharedHeads

#: Dimension of (batch, seq, hidden) that sequence parallelism shards.
_SEQUENCE = 1
#: The flash-attention kernel needs a sequence length that is a multiple of this, heads up to this size
#: (neuronx_distributed.kernels.flash_attn), and as many for each physical core.
_FLASH_SEQ_TILE, _FLASH_HEAD_DIM = 2048, 128


class NxdParts(Parts):
    """See :class:`trainer.model.decoder.Parts`. ``flash``: use the attention kernel where the shape allows it."""

    def __init__(
        self, parallel: ParallelConfig, dtype: torch.dtype, *, flash: bool, heads: SharedHeads | None = None
    ) -> None:
        super().__init__(
            parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size(), heads
        )
        self._flash, self._sequence = flash, parallel.sequence_parallel
        #: Physical NeuronCores of a logical one: 2 on trn2, unless ``NEURON_LOGICAL_NC_CONFIG`` says otherwise. They
        #: share the kernel's heads.
        self._cores = int(get_platform_lnc())
        # trainer.model.decoder sets the initial values.
        self._weight: dict[str, Any] = {"dtype": dtype, "init_method": _leave}
        # Without sequence parallelism the backward pass sums a copy in `reduce_dtype`, and drops the sum if activations
        # have another dtype (layers_utils.py, in 0.11 to 0.18). So `reduce_dtype` must be theirs.
        self._linear: dict[str, Any] = {
            "bias": False,
            "sequence_parallel_enabled": self._sequence,
            "sequence_dimension": _SEQUENCE if self._sequence else None,
            "reduce_dtype": torch.float32 if self._sequence else dtype,
        }

    def embedding(self, entries: int, width: int) -> nn.Module:
        """Return an embedding sharded by entries; with sequence parallelism its output is sharded by sequence."""
        return _Embedding(entries, width, sequence=self._sequence, **self._weight)

    def column_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """Return a layer that gathers a sharded sequence before the product."""
        layer: nn.Module = ColumnParallelLinear(
            in_features, out_features, gather_output=False, **self._linear, **self._weight
        )
        return layer

    def output(self, in_features: int, out_features: int) -> nn.Module:
        """Return a layer that computes logits, for the library's loss."""
        return self.column_parallel(in_features, out_features)

    def row_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """Return a layer that sums after the product; with sequence parallelism its output is sharded by sequence."""
        layer: nn.Module = RowParallelLinear(
            in_features, out_features, input_is_parallel=True, **self._linear, **self._weight
        )
        return layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Use the flash-attention kernel if the device has it and the shape allows it."""
        fits = not (q.shape[1] % self._cores or q.shape[2] % _FLASH_SEQ_TILE or q.shape[3] > _FLASH_HEAD_DIM)
        if not self._flash or mask is not None or not fits:
            return super().attend(q, k, v, mask)
        # The kernel's backward pass needs as many key/value heads as query heads.
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        out: Tensor = nki_flash_attn_func(q, k, v, lnc=self._cores, causal=True, transpose_nki_inputs=False)
        return out

    def recomputed(self, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        """Recompute with torch-xla's barrier; without it, the compiler merges both computations."""
        return checkpoint(function, *args, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]


def pipeline_modules() -> dict[str, Any]:
    """Return the modules that the library's pipeline doesn't trace into."""
    return {
        "transformer_layer_cls": Layer,
        "leaf_module_cls": [RMSNorm.__name__, Rotary.__name__, _Embedding.__name__],
        "autowrap_functions": (parallel_cross_entropy,),
    }


class WithLoss(nn.Module):
    """The model with its loss, which the library's pipeline splits into stages."""

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Map token ids and next ids (batch, seq) to the mean loss in nats per token, FP32."""
        assert self.llama.head is not None, "this backend does not tie embeddings"
        logits = self.llama(inputs).float()
        return parallel_cross_entropy(logits.flatten(0, 1), targets.flatten()).mean()  # type: ignore[no-any-return]


class _Embedding(ParallelEmbedding):  # type: ignore[misc]
    """The library's embedding, with sequence parallelism along dimension 1.

    The library does not shard that dimension, and does not sum with ``sequence_dimension=1``.
    """

    def __init__(
        self, entries: int, width: int, *, sequence: bool, dtype: torch.dtype, init_method: Callable[[Tensor], None]
    ) -> None:
        super().__init__(entries, width, dtype=dtype, init_method=init_method)
        self._shards_sequence = sequence

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = super().forward(tokens)
        if self._shards_sequence:
            embedded = mappings.scatter_to_sequence_parallel_region(embedded, sequence_dimension=_SEQUENCE)
        return embedded  # type: ignore[no-any-return]


def _leave(weight: Tensor) -> None:
    """Leave the weight uninitialized."""
