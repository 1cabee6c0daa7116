"""Convert weights and model configurations to and from Hugging Face's architectures.

``Family`` lists the architectures that our decoder can be, with their names of our weights. ``Weights`` reads a
checkpoint's weights by Hugging Face's names, a few tensors at a time, in any layout: ``export`` writes them to files,
and ``serve`` sends them to the process that evaluates them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.constraints import violations
from conf.environment import check_torchtitan
from conf.load import decode_dataclass
from conf.schema import Config, ModelConfig
from hlatctl.run.checkpoint import INDEX_FILES, why_invalid
from hlatctl.run.errors import CheckpointError, ConfigError, run_main
from hlatctl.run.files import DAMAGED, read_json, why
from trainer.checkpoint.shards import INDEX, WEIGHTS, describe_tensors, load_tensors, read_index
from trainer.model.decoder import Llama, mlp_blocks

_FAMILIES_NAMES = {"attention.o.weight": "self_attn.o_proj.weight", "mlp.down.weight": "mlp.down_proj.weight"}
_PRE_NORMS = {"attention_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
_POST_NORMS = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of Hugging Face that our decoder can be.

    Args:
        model_type: ``model_type`` in their ``config.json``.
        architecture: name of their class.
        qk_norm: our ``model.qk_norm``.
        norm_position: our ``model.norm_position``.
        rms_norm_eps: value if their ``config.json`` has none.
        head_dim: value if their ``config.json`` has none; None: hidden size / heads.
        layer_names: our names of a layer's weights to theirs, without the coalesced ones.
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
        layer_names=_PRE_NORMS | _FAMILIES_NAMES,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        norm_position="pre",
        rms_norm_eps=1e-6,
        head_dim=128,
        layer_names=_PRE_NORMS | _qk_norms("head_norm") | _FAMILIES_NAMES,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        qk_norm="all",
        norm_position="post",
        rms_norm_eps=1e-5,
        layer_names=_POST_NORMS | _qk_norms("norm") | _FAMILIES_NAMES,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """An architecture of Hugging Face that only torchtitan trains; its adapter knows the names of the weights.

    Args:
        model_type: ``model_type`` in their ``config.json``.
        keys: our keys to theirs, in addition to those of every family.
        values: our keys that follow from the architecture.
        only: see :data:`_ONLY`.
    """

    model_type: str
    keys: dict[str, str]
    values: dict[str, Any]
    only: dict[str, Any]


_LATENT_KEYS = {
    key: key for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
_MIXTURES = (
    Mixture(
        model_type="qwen3_moe",
        keys={"num_experts": "num_experts"},
        values={"qk_norm": "head", "router_score": "softmax"},
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Mixture(
        model_type="deepseek_v3",
        keys={
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "num_dense_layers": "first_k_dense_replace",
            "router_scale": "routed_scaling_factor",
            "router_groups": "n_group",
            "router_limited_groups": "topk_group",
            **_LATENT_KEYS,
        },
        values={"router_score": "sigmoid", "head_dim": None},
        only={"rope_interleave": True},
    ),
    Mixture(
        model_type="deepseek_v2",
        keys={
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "num_dense_layers": "first_k_dense_replace",
            "router_scale": "routed_scaling_factor",
            **_LATENT_KEYS,
        },
        values={"router_score": "softmax", "head_dim": None},
        only={"topk_method": "greedy", "norm_topk_prob": False},
    ),
)
#: Values of ``model_type`` whose models are torchtitan's by name, because keys of ``model`` can't describe them.
NAMED = ("gpt_oss",)
_MIXTURE_KEYS = {
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate_size": "moe_intermediate_size",
    "normalize_router_weights": "norm_topk_prob",
}


def family_of(model: ModelConfig) -> Family:
    """Return a valid model's family."""
    return next(f for f in FAMILIES if (f.qk_norm, f.norm_position) == (model.qk_norm, model.norm_position))


_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
#: Our keys to theirs; keys with a default in their configuration are read separately.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_EXTENSION = {"rope_scaling_factor": "factor", "rope_original_seq_len": "original_max_position_embeddings"}
#: Our keys to those of ``rope_scaling``, by its ``rope_type``.
_ROPE_KEYS = {
    "llama3": {**_EXTENSION, "rope_low_freq_factor": "low_freq_factor", "rope_high_freq_factor": "high_freq_factor"},
    "yarn": {**_EXTENSION, "rope_beta_slow": "beta_slow", "rope_beta_fast": "beta_fast"},
}
#: What transformers takes if ``rope_scaling`` lacks a key.
_ROPE_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}
#: All of their keys that differ from ours.
_THEIR_NAMES = {
    **_KEYS,
    **_ROPE_KEYS["llama3"],
    **_ROPE_KEYS["yarn"],
    "num_kv_heads": "num_key_value_heads",
    "tie_embeddings": "tie_word_embeddings",
}
#: The only supported value of each key; absent and null mean the same.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "quantization_config": {},
}
_QKV, _GATE_UP = "attention.qkv.weight", "mlp.gate_up.weight"


def to_hugging_face(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return weights by the names of the model's family, with the coalesced layers split."""
    named: dict[str, Tensor] = {}
    layer_names = family_of(model).layer_names
    for name, tensor in weights.items():
        if name in _NAMES:
            named[_NAMES[name]] = tensor
            continue
        _, number, rest = name.split(".", 2)
        layer = f"model.layers.{number}."
        if rest == _QKV:
            for part, cut in zip("qkv", split_qkv(tensor, model), strict=True):
                named[f"{layer}self_attn.{part}_proj.weight"] = cut
        elif rest == _GATE_UP:
            for part, cut in zip(("gate", "up"), _split_gate_up(tensor, model), strict=True):
                named[f"{layer}mlp.{part}_proj.weight"] = cut
        else:
            named[layer + layer_names[rest]] = tensor
    return named


def from_hugging_face(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return weights by our names, the inverse of :func:`to_hugging_face`; a KeyError names a missing one."""
    return {name: joined(name, weights.__getitem__, model) for name in empty_weights(model)}


def joined(name: str, read: Callable[[str], Tensor], model: ModelConfig) -> Tensor:
    """Return our weight of this name; ``read`` returns Hugging Face's of a name."""
    if name in _NAMES:
        return read(_NAMES[name])
    _, number, rest = name.split(".", 2)
    layer = f"model.layers.{number}."
    if rest == _QKV:
        return join_qkv([read(f"{layer}self_attn.{part}_proj.weight") for part in "qkv"], model)
    if rest == _GATE_UP:
        gate, up = (read(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up"))
        return _join_gate_up(gate, up, model)
    return read(layer + family_of(model).layer_names[rest])


def empty_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Return a model's weights by our names, without values."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in Llama(model, 2).named_parameters()}


def hugging_face_config(model: ModelConfig, *, seq_len: int, bos_id: int, eos_id: int, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of the model's family; ``dtype`` is torch's name, such as ``float32``.

    The rotary embeddings are spelled as in transformers 4, which transformers 5 reads too.
    """
    family = family_of(model)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": (rope := _rope_scaling(model)),
        "max_position_embeddings": longest_sequence(rope, seq_len),
        "initializer_range": model.initializer_range,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
    }


def model_config(described: dict[str, Any], file: Path) -> ModelConfig:
    """Return the model that a ``config.json`` of transformers 4 or 5 describes, named after its folder.

    Raises a CheckpointError if its family is unknown, or a value is unsupported, out of range or of a wrong type.
    """
    families = {family.model_type: family for family in (*FAMILIES, *_MIXTURES)}
    family = families.get(str(described.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{file}: model_type={described.get('model_type')!r}: not supported",
            hint=f"must be one of: {', '.join([*families, *NAMED])}",
        )
    check_kinds(described, file)
    missing = [key for key in _KEYS.values() if key not in described]
    if missing:
        raise CheckpointError(f"{file}: lacks {', '.join(missing)}", hint="import a folder of `save_pretrained`")
    keys = {ours: described[theirs] for ours, theirs in _KEYS.items()}
    keys["num_kv_heads"] = _given(described, "num_key_value_heads", keys["num_heads"])
    keys |= _rope_keys(described, file)
    keys["tie_embeddings"] = _given(described, "tie_word_embeddings", False)
    if isinstance(family, Mixture):
        keys["rms_norm_eps"] = _given(described, "rms_norm_eps", 1e-6)
        keys |= _mixture_keys(described, family, file)
    else:
        keys |= {"qk_norm": family.qk_norm, "norm_position": family.norm_position}
        keys["rms_norm_eps"] = _given(described, "rms_norm_eps", family.rms_norm_eps)
        keys["head_dim"] = _given(described, "head_dim", family.head_dim)
    model = _decoded(keys | {"name": file.parent.name}, file)
    if model.query_width == model.hidden_size:
        model = replace(model, head_dim=None)
    only = _ONLY | (family.only if isinstance(family, Mixture) else {})
    unsupported = [*_other_values(described, only), *_odd_shapes(model)]
    if unsupported:
        raise CheckpointError(
            f"{file}: {'; '.join(unsupported)}: not supported",
            hint="models with SiLU, rotary embeddings (plain, llama3 or yarn), full attention, no biases and whole "
            "heads can be imported",
        )
    return model


def _mixture_keys(described: dict[str, Any], family: Mixture, file: Path) -> dict[str, Any]:
    theirs = _MIXTURE_KEYS | family.keys
    missing = [key for ours, key in theirs.items() if key not in described and ours != "q_lora_rank"]
    if missing:
        raise CheckpointError(f"{file}: lacks {', '.join(missing)}", hint="import a folder of `save_pretrained`")
    keys = {ours: described.get(key) for ours, key in theirs.items()}
    if keys.get("router_groups") == 1:  # one group of all experts is no limit
        del keys["router_groups"], keys["router_limited_groups"]
    return {"head_dim": described.get("head_dim"), **keys, **family.values}


def _given(described: dict[str, Any], key: str, default: Any) -> Any:
    """Return a key's value; absent and null mean the default."""
    value = described.get(key)
    return default if value is None else value


def _decoded(keys: dict[str, Any], file: Path) -> ModelConfig:
    """Return the model described by our keys, after a check of types and bounds. Errors name their keys."""
    try:
        model = decode_dataclass(ModelConfig, keys, "")
        for error in violations(model):
            raise error
    except ConfigError as error:
        ours, separator, rest = error.message.partition("=")
        raise CheckpointError(
            f"{file}: {_THEIR_NAMES.get(ours, ours)}{separator}{rest}", hint="copy config.json again"
        ) from None
    return model


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rope_scaling == "none":
        return None
    keys = _ROPE_KEYS[model.rope_scaling]
    return {"rope_type": model.rope_scaling, **{theirs: getattr(model, ours) for ours, theirs in keys.items()}}


def longest_sequence(rope_scaling: dict[str, Any] | None, seq_len: int) -> int:
    """Return ``max_position_embeddings``. transformers 4 takes YaRN's factor from it; otherwise it is ``seq_len``."""
    if rope_scaling is None or rope_scaling["rope_type"] != "yarn":
        return seq_len
    return int(rope_scaling["factor"] * rope_scaling["original_max_position_embeddings"])


def rope_of(described: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embeddings' values: ``rope_parameters`` of transformers 5, ``rope_scaling`` of 4."""
    return {**_given(described, "rope_parameters", {}), **_given(described, "rope_scaling", {})}


def check_kinds(described: dict[str, Any], file: Path) -> None:
    """Refuse values that are not decoded and have another type than in any ``config.json``."""
    for key, kind, name in (
        ("rope_parameters", dict, "an object"),
        ("rope_scaling", dict, "an object"),
        ("layer_types", list, "a list"),
    ):
        value = _given(described, key, kind())
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{file}: {key}={value!r}: is {type(value).__name__}, must be {name}", hint="copy config.json again"
            )


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_keys(described: dict[str, Any], file: Path) -> dict[str, Any]:
    rope = rope_of(described)
    keys = {"rope_theta": _given(rope, "rope_theta", _given(described, "rope_theta", 10_000.0))}
    kind = _rope_type(rope)
    if kind not in _ROPE_KEYS:
        return keys
    # transformers takes the longest sequence if the original one is not given.
    if rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = described.get("max_position_embeddings")
    if kind == "yarn":
        rope |= {key: _given(rope, key, value) for key, value in _ROPE_DEFAULTS.items()}
    missing = [theirs for theirs in _ROPE_KEYS[kind].values() if rope.get(theirs) is None]
    if missing:
        raise CheckpointError(f"{file}: rope_scaling lacks {', '.join(missing)}", hint="copy config.json again")
    return keys | {"rope_scaling": kind} | {ours: rope[theirs] for ours, theirs in _ROPE_KEYS[kind].items()}


def _other_values(described: dict[str, Any], only: dict[str, Any]) -> list[str]:
    """Return the unsupported values as ``key=value``."""
    others = [f"{key}={described[key]!r}" for key, ours in only.items() if described.get(key) not in (None, ours)]
    layer_types = _given(described, "layer_types", [])
    if any(kind != "full_attention" for kind in layer_types):
        others.append(f"layer_types={layer_types!r}")
    rope = rope_of(described)
    others += [f"rope_parameters.{key}={value!r}" for key, value in rope.items() if isinstance(value, dict)]
    if _rope_type(rope) not in ("default", *_ROPE_KEYS):
        others.append(f"rope_type={_rope_type(rope)!r}")
    if _rope_type(rope) == "yarn":
        others += _other_yarn(rope, is_latent=bool(described.get("kv_lora_rank")))
    if _given(rope, "partial_rotary_factor", 1.0) != 1.0:
        others.append(f"partial_rotary_factor={rope['partial_rotary_factor']!r}")
    return others


def _other_yarn(rope: dict[str, Any], *, is_latent: bool) -> list[str]:
    """Return the keys of ``rope_scaling`` that give attention another scale than ours, or another ramp.

    transformers has the paper's scale in the rotation; with latent attention, torchtitan has it in the logits.
    """
    keys = ("mscale", "mscale_all_dim", "attention_factor")
    given = {key: rope[key] for key in keys if rope.get(key) is not None}
    if is_latent:
        differs = given != {"mscale": 1.0, "mscale_all_dim": 1.0}
    else:
        factor = given.get("attention_factor")
        usual = 0.1 * math.log(rope["factor"]) + 1.0
        differs = bool(rope.get("mscale") and rope.get("mscale_all_dim")) and factor is None
        differs |= factor is not None and not (isinstance(factor, float) and math.isclose(factor, usual, rel_tol=1e-6))
    others = [f"rope_scaling={ {key: given.get(key) for key in keys} }"] if differs else []
    if rope.get("truncate") is False:
        others.append("rope_scaling.truncate=False")
    return others


def _odd_shapes(model: ModelConfig) -> list[str]:
    problems = []
    if model.rope_low_freq_factor >= model.rope_high_freq_factor:
        problems.append(f"rope_scaling={_rope_scaling(model)} (must have low_freq_factor < high_freq_factor)")
    if model.rope_beta_slow >= model.rope_beta_fast:
        problems.append(f"rope_scaling={_rope_scaling(model)} (must have beta_slow < beta_fast)")
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        problems.append(f"rope_theta={model.rope_theta} (must be greater than 1)")
    if model.head_dim is None and model.hidden_size % model.num_heads:
        problems.append(f"num_attention_heads={model.num_heads} (must divide hidden_size={model.hidden_size})")
    elif model.head_width % 2 or not model.head_width:
        problems.append(f"head_dim={model.head_width} (must be even)")
    if model.num_heads % model.num_kv_heads:
        problems.append(f"num_key_value_heads={model.num_kv_heads} (must divide num_attention_heads={model.num_heads})")
    return problems


def split_qkv(weight: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a matrix that has them by groups: a group's queries, its key, its value."""
    queries = model.num_heads // model.num_kv_heads
    groups = weight.view(model.num_kv_heads, queries + 2, model.head_width, -1)
    q, k, v = (part.flatten(0, 2).contiguous() for part in torch.split(groups, [queries, 1, 1], dim=1))
    return q, k, v


def join_qkv(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Return the inverse of :func:`split_qkv`."""
    shape = (model.num_kv_heads, -1, model.head_width, model.hidden_size)
    return torch.cat([part.view(shape) for part in parts], dim=1).flatten(0, 2)


def _split_gate_up(weight: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor]:
    blocks = weight.view(mlp_blocks(model), 2, -1, model.hidden_size)
    gate, up = (part.flatten(0, 1).contiguous() for part in blocks.unbind(1))
    return gate, up


def _join_gate_up(gate: Tensor, up: Tensor, model: ModelConfig) -> Tensor:
    shape = (mlp_blocks(model), -1, model.hidden_size)
    return torch.stack([gate.view(shape), up.view(shape)], dim=1).flatten(0, 2)


#: Prefixes of a checkpoint's tensors, by ``eval.weights``.
PREFIXES = {"trained": WEIGHTS, "ema": "ema."}


def _no_average(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder}: has no average of its weights",
        hint="omit `ema`, or name a checkpoint of a run with optimizer.ema_decay",
    )


class Weights:
    """The weights of a checkpoint; the moments are not read.

    ``ours`` has the tensors by their names in the checkpoint, without values. ``left_out`` has the names of those that
    Hugging Face's model lacks.

    Args:
        kind: ``trained``, or ``ema`` for their average.

    Raises a CheckpointError if it has no weights, differs from the run's model, or can't be read.
    """

    left_out: Sequence[str] = ()

    def __init__(self, folder: Path, config: Config, kind: str = "trained") -> None:
        self._folder, self._config, self._prefix = folder, config, PREFIXES[kind]
        stored = describe_tensors(folder) if (folder / INDEX).is_file() else {}  # a simulated one has no tensors
        self.ours = {name.removeprefix(self._prefix): stored[name] for name in stored if name.startswith(self._prefix)}
        if stored and not self.ours:
            raise _no_average(folder)
        if not self.ours:
            raise CheckpointError(f"{folder}: has no weights", hint="choose a trained run; --dry-run trains nothing")
        self._check_shapes()
        self._index = read_index(folder)

    @classmethod
    def open(cls, folder: Path, config: Config, kind: str = "trained") -> Weights:
        """Return the weights of a checkpoint of a run with this configuration, of either engine."""
        if not (folder / INDEX_FILES["dcp"]).is_file():
            return cls(folder, config, kind)
        if kind != "trained":
            raise _no_average(folder)
        try:
            from trainer.convert.torchtitan import TitanWeights  # takes seconds
            from trainer.torchtitan.models import model_spec

            return TitanWeights(folder, model_spec(config))
        except ModuleNotFoundError:
            check_torchtitan(config)
            raise

    def described(self) -> dict[str, tuple[str, Tensor]]:
        """Return, by Hugging Face's names, our name of the tensor that contains each, and the tensor without values."""
        return {
            name: (ours, part)
            for ours, tensor in self.ours.items()
            for name, part in self._to_hugging_face({ours: tensor}).items()
        }

    def read(self, ours: Sequence[str]) -> dict[str, Tensor]:
        """Return some of our tensors by Hugging Face's names, with the coalesced ones split.

        Raises a CheckpointError if they can't be read, or the checkpoint was removed meanwhile.
        """
        values = {name: torch.empty_like(self.ours[name], device="cpu") for name in ours}
        try:
            self._load(values)
        except CheckpointError as error:
            reason = why_invalid(self._folder, checksums=False)  # a running run may delete the checkpoint
            if reason is None:
                raise
            raise CheckpointError(
                f"{self._folder}: was removed while it was read ({reason})",
                hint="use a milestone's checkpoint, which is kept until it is evaluated",
            ) from error
        return self._to_hugging_face(values)

    def config(self, *, seq_len: int, bos_id: int, eos_id: int, dtype: str) -> dict[str, Any]:
        """Return the ``config.json``; ``dtype`` is torch's name, such as ``float32``."""
        model = self._config.model
        return hugging_face_config(model, seq_len=seq_len, bos_id=bos_id, eos_id=eos_id, dtype=dtype)

    def _load(self, values: dict[str, Tensor]) -> None:
        load_tensors({self._prefix + name: tensor for name, tensor in values.items()}, self._folder, self._index)

    def _to_hugging_face(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_hugging_face(weights, self._config.model)

    def _check_shapes(self) -> None:
        with torch.device("meta"):
            expected = Llama(self._config.model, self._config.train.seq_len).state_dict()
        for name, tensor in expected.items():
            if name not in self.ours:
                raise CheckpointError(f"{self._folder}: {self._prefix}{name} is missing")
            if (shape := tuple(self.ours[name].shape)) != (wanted := tuple(tensor.shape)):
                raise CheckpointError(f"{self._folder}: {self._prefix}{name} has shape {shape}, expected {wanted}")


class Parts:
    """A model's tensors by Hugging Face's names, read one at a time. A tensor that contains several is read once.

    ``tensors`` has each by name, without values.

    Args:
        places: each tensor without values, with what ``read`` takes to read it.
        read: returns some tensors by name; those that nobody has asked for wait in memory.
    """

    def __init__(self, places: Mapping[str, tuple[Hashable, Tensor]], read: Callable[[Any], dict[str, Tensor]]) -> None:
        self.tensors = {name: tensor for name, (_, tensor) in places.items()}
        self._places = {name: place for name, (place, _) in places.items()}
        self._read = read
        self._waiting: dict[str, Tensor] = {}

    @classmethod
    def of(cls, weights: Weights) -> Parts:
        """Return the tensors of one of our checkpoints."""
        return cls(weights.described(), lambda ours: weights.read([ours]))

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises a CheckpointError if it can't be read."""
        if name not in self._waiting:
            self._waiting |= self._read(self._places[name])
        return self._waiting.pop(name)


def main() -> int:
    """Print the model that a ``config.json`` describes, as JSON: its keys that differ from the schema's defaults."""
    file, usual = Path(sys.argv[1]), ModelConfig()
    try:
        model = model_config(read_json(file), file)
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"{file}: can't be read ({why(error)})", hint="name a config.json") from None
    keys = {each.name: getattr(model, each.name) for each in fields(model)}
    print(json.dumps({key: value for key, value in keys.items() if value != getattr(usual, key)}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
