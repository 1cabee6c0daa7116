"""Our names and coalesced layers to and from those of Hugging Face's ``LlamaForCausalLM``. Tensors only, no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conf.schema import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_QKV, _GATE_UP = "attention.qkv.weight", "mlp.gate_up.weight"


def to_hugging_face(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Weights by our names to those of ``LlamaForCausalLM``; the coalesced layers are cut apart."""
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in _NAMES:
            named[_NAMES[name]] = tensor
            continue
        _, number, rest = name.split(".", 2)
        layer = f"model.layers.{number}."
        if rest == _QKV:
            for part, cut in zip("qkv", _split_qkv(tensor, model), strict=True):
                named[f"{layer}self_attn.{part}_proj.weight"] = cut
        elif rest == _GATE_UP:
            for part, cut in zip(("gate", "up"), _split_gate_up(tensor, model), strict=True):
                named[f"{layer}mlp.{part}_proj.weight"] = cut
        else:
            named[layer + _LAYER_NAMES[rest]] = tensor
    return named


def from_hugging_face(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of :func:`to_hugging_face`.

    Raises:
        KeyError: a weight is missing; its name.
    """
    ours = {name: weights[theirs] for name, theirs in _NAMES.items() if name != "head.weight"}
    if not model.tie_embeddings:
        ours["head.weight"] = weights[_NAMES["head.weight"]]
    for number in range(model.num_layers):
        theirs, layer = f"model.layers.{number}.", f"layers.{number}."
        ours |= {layer + name: weights[theirs + their_name] for name, their_name in _LAYER_NAMES.items()}
        q, k, v = (weights[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv")
        ours[layer + _QKV] = _join_qkv(q, k, v, model)
        gate, up = (weights[f"{theirs}mlp.{part}_proj.weight"] for part in ("gate", "up"))
        ours[layer + _GATE_UP] = _join_gate_up(gate, up, model)
    return ours


def hugging_face_config(model: ModelConfig, *, seq_len: int, bos_id: int, eos_id: int, dtype: str) -> dict[str, Any]:
    """``config.json`` of ``LlamaForCausalLM``; ``dtype`` as torch names it, such as ``float32``."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim, "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps, "rope_theta": model.rope_theta,
        "max_position_embeddings": seq_len, "initializer_range": model.initializer_range,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": model.tie_embeddings, "torch_dtype": dtype,
        "bos_token_id": bos_id, "eos_token_id": eos_id,
    }  # fmt: skip


def _split_qkv(weight: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    queries = model.num_heads // model.num_kv_heads
    groups = weight.view(model.num_kv_heads, queries + 2, model.head_dim, -1)
    q, k, v = (part.flatten(0, 2).contiguous() for part in torch.split(groups, [queries, 1, 1], dim=1))
    return q, k, v


def _join_qkv(q: Tensor, k: Tensor, v: Tensor, model: ModelConfig) -> Tensor:
    import torch

    shape = (model.num_kv_heads, -1, model.head_dim, model.hidden_size)
    return torch.cat([part.view(shape) for part in (q, k, v)], dim=1).flatten(0, 2)


def _split_gate_up(weight: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor]:
    from trainer.model import mlp_blocks

    blocks = weight.view(mlp_blocks(model), 2, -1, model.hidden_size)
    gate, up = (part.flatten(0, 1).contiguous() for part in blocks.unbind(1))
    return gate, up


def _join_gate_up(gate: Tensor, up: Tensor, model: ModelConfig) -> Tensor:
    import torch

    from trainer.model import mlp_blocks

    shape = (mlp_blocks(model), -1, model.hidden_size)
    return torch.stack([gate.view(shape), up.view(shape)], dim=1).flatten(0, 2)
