"""Recomputation by operator: the backward pass repeats what is cheap and reads what was dear.

Kept are the results of attention and of every second matrix product, as in torchtitan
(``torchtitan/distributed/activation_checkpoint.py``). Of a layer's four products these are the wide ones, ``qkv`` and
``gate_up``. ``o`` is computed again; nothing needs the result of ``down`` again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.attention import Mask

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN._scaled_mm.default}
_KEPT = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch._higher_order_ops.flex_attention,
    # The largest entry of a tensor gives its FP8 scale: one number for a pass over all entries.
    _ATEN.max.default,
}


def recomputed_by_operator(function: Callable[..., Tensor], *args: Mask | None) -> Tensor:
    """Call the function; results of the operators that are not kept are recomputed in the backward pass."""
    return checkpoint(  # type: ignore[no-any-return]
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
    )


def _contexts() -> tuple[Any, Any]:
    """Return the contexts of a forward pass and of its recomputation; each counts its products."""
    products: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in _KEPT
        if operator in _PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return forward, again
