"""How initial weights and learning rates follow the width: the maximal update parametrization (muP).

With muP (Tensor Programs V, arXiv 2203.03466), activations and their changes in a step are of the same size at every
width. So the best learning rate is the same too, and a narrow model can find it for a wide one. With the factor m =
``hidden_size / mup_base_width``:

- Embedding and norms don't change.
- Matrices of layers: initial standard deviation x 1 / sqrt(m), learning rate x 1 / m.
- Output projection: initial standard deviation x 1 / m, learning rate x 1 / m.

These are the rules of the paper's table 3. Its table 8, which most others implement, multiplies the logits by 1 / m
instead of the last two factors. Both train alike (lemma J.1), but here the weights alone are the model: exports,
evaluations and other engines need no multiplier. Attention is divided by sqrt(head_dim), and by head_dim in the paper:
the same as long as all widths share the width of a head.

Trainer and torchtitan's configuration share these rules, so nothing here needs torch.
"""

from __future__ import annotations

import math

from conf.schema import ModelConfig


def initial_std(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a parameter's initial values; ``name`` is ours, and not of a norm."""
    std = model.initializer_range
    if model.scaled_initialization and name.endswith(("attention.o.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
    if name == "embedding.weight" or model.mup_base_width is None:
        return std
    return std / (model.width_factor if name == "head.weight" else math.sqrt(model.width_factor))


def rate_factor(name: str, model: ModelConfig, *, orthogonalized: bool = False) -> float:
    """Return the factor of a parameter's learning rate. It isn't one of weight decay.

    Args:
        name: our name of the parameter.
        orthogonalized: its update is orthogonalized, and as large as AdamW's (``optimizer.name=muon``). The largest
            singular value of such an update grows with the root of the width, that of AdamW's with the width.
    """
    if model.mup_base_width is None or name.endswith(("embedding.weight", "norm.weight")):
        return 1.0
    return 1.0 / (math.sqrt(model.width_factor) if orthogonalized else model.width_factor)
