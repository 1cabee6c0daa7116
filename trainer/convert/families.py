"""The architectures of Hugging Face that our decoder can be, and their names of our weights."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import ModelConfig

_NAMES = {"attention.o.weight": "self_attn.o_proj.weight", "mlp.down.weight": "mlp.down_proj.weight"}
_PRE_NORMS = {"attention_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
_POST_NORMS = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture.

    Args:
        model_type: in their ``config.json``.
        architecture: their class.
        qk_norm: our ``model.qk_norm``.
        norm_position: our ``model.norm_position``.
        rms_norm_eps: if their ``config.json`` has none.
        head_dim: the same; None: hidden size / heads.
        layer_names: their names of a layer's weights by ours, without the coalesced ones.
    """

    model_type: str
    architecture: str
    qk_norm: str
    norm_position: str
    rms_norm_eps: float
    head_dim: int | None = None
    layer_names: dict[str, str]


def _qk_norms(kind: str) -> dict[str, str]:
    return {f"attention.norms.{part}_{kind}.weight": f"self_attn.{part}_norm.weight" for part in "qk"}


FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        qk_norm="none",
        norm_position="pre",
        rms_norm_eps=1e-6,
        layer_names=_PRE_NORMS | _NAMES,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        norm_position="pre",
        rms_norm_eps=1e-6,
        head_dim=128,
        layer_names=_PRE_NORMS | _qk_norms("head_norm") | _NAMES,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        qk_norm="all",
        norm_position="post",
        rms_norm_eps=1e-5,
        layer_names=_POST_NORMS | _qk_norms("norm") | _NAMES,
    ),
)


def family_of(model: ModelConfig) -> Family:
    """Return a valid model's family."""
    return next(f for f in FAMILIES if (f.qk_norm, f.norm_position) == (model.qk_norm, model.norm_position))
