"""Convert torchtitan's checkpoints to and from Hugging Face, and to and from this project's own format.

torchtitan's own adapters (``state_dict_adapter``) know the names and layouts of each family. Its rotary embeddings of
Llama and DeepSeek-V3 rotate neighbouring elements, those of Hugging Face and ours two halves; the adapters reorder the
rows of queries and keys. Our own format is converted by way of Hugging Face's names, so no further table is needed.
Moments are reordered as their weights.

``python -m trainer.convert.torchtitan --run-dir RUN --step N --to DIR`` converts a checkpoint to the other engine's
format. It needs host memory for weights and moments.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conf.of_run import of_run
from conf.schema import Config, ModelConfig
from conf.sizes import has_shape
from conf.training_rules import learning_rate
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest, why_invalid, write_manifest
from hlatctl.run.errors import CheckpointError, ConfigError, run_main
from hlatctl.run.files import new_folder, reading
from hlatctl.run.paths import RunPaths
from trainer.checkpoint import dcp
from trainer.checkpoint.shards import WEIGHTS, read_tensors, save_whole
from trainer.convert.hugging_face import (
    Weights,
    check_kinds,
    from_hugging_face,
    longest_sequence,
    rope_of,
    to_hugging_face,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torchtitan.protocols.model_spec import ModelSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")
#: torchtitan's names of the states that are no weights.
_OPTIMIZER, _TIED_HEAD, _EMBEDDING = "optimizer", "lm_head.weight", "tok_embeddings.weight"
#: Buffers of torchtitan's mixtures that balance the experts in training.
_BALANCE = "moe.expert_bias_E"


class TitanWeights(Weights):
    """The weights of a DCP checkpoint; optimizer states are not read.

    ``left_out`` has the names of weights that the family's Hugging Face model doesn't have, and that aren't 0.

    Raises a CheckpointError if torchtitan can't convert the family, the checkpoint has other weights than the model, or
    it can't be read.

    Args:
        folder: the checkpoint's.
        spec: its model.
        prefix: of the weights' names; torchtitan's own have none, others store the model as ``model``.
    """

    def __init__(self, folder: Path, spec: ModelSpec, prefix: str = "") -> None:
        self._folder, self._spec, self._adapter, self._prefix = folder, spec, adapter_of(spec), prefix
        self._metadata = dcp.read_metadata(folder)
        stored = _described(self._metadata, prefix)
        for name, tensor in _expected(spec).items():
            if name not in stored:
                raise CheckpointError(f"{folder}: {name} is missing")
            if (shape := tuple(stored[name].shape)) != (wanted := tuple(tensor.shape)):
                raise CheckpointError(f"{folder}: {name} has shape {shape}, expected {wanted}")
        named = {name: self._to_hugging_face({name: tensor}) for name, tensor in stored.items()}
        self.ours = {name: stored[name] for name, theirs in named.items() if theirs}
        others = _allocated({name: stored[name] for name in set(stored) - set(self.ours) - _tied(spec)})
        self._load(others)
        self.left_out = sorted(name for name, value in others.items() if value.any())

    def config(self, *, seq_len: int, bos_id: int, eos_id: int, dtype: str) -> dict[str, Any]:
        """Return the model's ``config.json``."""
        ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
        described = hugging_face_config(self._spec)
        longest = longest_sequence(described["rope_scaling"], seq_len)
        return {**described, "max_position_embeddings": longest, "torch_dtype": dtype, **ids}

    def _load(self, values: dict[str, Tensor]) -> None:
        named = {f"{self._prefix}{name}": tensor for name, tensor in values.items()}
        dcp.load(named, self._folder, metadata=self._metadata)

    def _to_hugging_face(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {name: tensor for name, tensor in weights.items() if name not in _tied(self._spec)}
        converted: dict[str, Tensor] = self._adapter.to_hf(own)
        return converted


def adapter_of(spec: ModelSpec) -> Any:
    """Return torchtitan's adapter to and from Hugging Face. Raises a CheckpointError if the family has none."""
    if spec.state_dict_adapter is None:
        raise CheckpointError(f"torchtitan can't convert {spec.name} to Hugging Face's format")
    adapter = spec.state_dict_adapter(spec.model, None)
    if spec.name == "gpt_oss":
        return _GptOssAdapter(adapter)
    return _DeepSeekV2Adapter(adapter) if _is_deepseek_v2(spec) else adapter


#: transformers' names of a layer's experts by torchtitan's, and whether a matrix is transposed.
_GPT_OSS_EXPERTS = {
    "moe.routed_experts.inner_experts.mlp1_weight_EGD": ("mlp.experts.gate_up_proj", True),
    "moe.routed_experts.inner_experts.mlp1_bias_EG": ("mlp.experts.gate_up_proj_bias", False),
    "moe.routed_experts.inner_experts.mlp2_weight_EDF": ("mlp.experts.down_proj", True),
    "moe.routed_experts.inner_experts.mlp2_bias_ED": ("mlp.experts.down_proj_bias", False),
}


class _GptOssAdapter:
    """torchtitan's adapter, which skips what it doesn't know, such as its own names of gpt-oss's experts (0.3.0)."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def to_hf(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        theirs = {}
        for name, tensor in state.items():
            layer, _, rest = name.partition(".moe.")
            if known := _GPT_OSS_EXPERTS.get(f"moe.{rest}"):
                theirs[f"model.{layer}.{known[0]}"] = tensor.mT.contiguous() if known[1] else tensor
            else:
                theirs |= self._adapter.to_hf({name: tensor})
        return theirs

    def from_hf(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by torchtitan's names; a KeyError names one that it doesn't have."""
        experts = {name: (ours, is_transposed) for ours, (name, is_transposed) in _GPT_OSS_EXPERTS.items()}
        state: dict[str, Tensor] = {}
        for name, tensor in theirs.items():
            layer, _, rest = name.removeprefix("model.").partition(".mlp.")
            if known := experts.get(f"mlp.{rest}"):
                state[f"{layer}.{known[0]}"] = tensor.mT.contiguous() if known[1] else tensor
            elif ours := self._adapter.from_hf({name: tensor}):
                state |= ours
            else:
                raise KeyError(name)
        return state


class _DeepSeekV2Adapter:
    """DeepSeek-V3's adapter without the router's bias, which DeepSeek-V2 doesn't have."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def to_hf(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {name: tensor for name, tensor in state.items() if not name.endswith(_BALANCE)}
        return dict(self._adapter.to_hf(own))

    def from_hf(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(self._adapter.from_hf(theirs))


def _is_deepseek_v2(spec: ModelSpec) -> bool:
    """Return whether a model of torchtitan's family `deepseek_v3` is a DeepSeek-V2: its routers have softmax scores."""
    mixtures = [layer.moe for layer in spec.model.layers if layer.moe is not None]
    return spec.name == "deepseek_v3" and bool(mixtures) and mixtures[0].router.score_func == "softmax"


def _tied(spec: ModelSpec) -> set[str]:
    """Return the name of the head if it is the embedding's tensor, which a state dict then has twice."""
    return {_TIED_HEAD} if spec.model.enable_weight_tying else set()


def _described(metadata: Metadata, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights by name, without values: torchtitan stores them at the top level of the state dict."""
    paths = metadata.planner_data or {}
    tensors = dcp.describe_tensors(metadata)
    return {
        name.removeprefix(prefix): tensor
        for name, (tensor, _) in tensors.items()
        if (name.startswith(prefix) if prefix else len(paths.get(name, (name,))) == 1)
    }


def _expected(spec: ModelSpec) -> dict[str, Tensor]:
    return dict(_empty(spec).state_dict())


def _empty(spec: ModelSpec) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = spec.model.build()
    return model


def hugging_face_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what a ``config.json`` says about the shape of a model.

    Raises a CheckpointError if transformers has no such model.
    """
    describe = _FAMILIES.get(spec.name)
    if describe is None:
        raise CheckpointError(
            f"{spec.name}: its config.json is not known here",
            hint=f"families that can be exported: {', '.join(_FAMILIES)}",
        )
    try:
        return _described_for_hugging_face(spec.model, describe)
    except AttributeError as error:
        raise CheckpointError(f"{spec.name}: is built from other parts than torchtitan's family ({error})") from None


def _described_for_hugging_face(model: Any, describe: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": model.layers[0].attention.n_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm.eps,
        "attention_bias": False,
        "tie_word_embeddings": model.enable_weight_tying,
        **_rope(model.layers[0].attention),
        **describe(model),
    }


def _rope(attention: Any) -> dict[str, Any]:
    rope = attention.rope
    kinds: dict[str, dict[str, Any] | None] = {
        "none": None,
        "llama": {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        },
        "yarn": {
            "rope_type": "yarn",
            "factor": rope.rope_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "original_max_position_embeddings": rope.original_seq_len,
            "truncate": rope.truncate,
            # Both are equal, so that only the scale of attention's logits depends on it, as in torchtitan.
            **dict.fromkeys(("mscale", "mscale_all_dim"), getattr(attention, "mscale", 1.0)),
        },
    }
    return {"rope_theta": rope.theta, "rope_scaling": kinds[rope.scaling]}


def _grouped_queries(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    return {
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
    }


def _latent(attention: Any) -> dict[str, Any]:
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": attention.q_lora_rank or None, **{key: getattr(attention, key) for key in widths}}


def _dense_width(model: Any, otherwise: int = 0) -> int:
    widths = [layer.feed_forward.w1.out_features for layer in model.layers if layer.feed_forward is not None]
    return int(widths[0] if widths else otherwise)


def _llama(model: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": _dense_width(model),
        "mlp_bias": False,
        **_grouped_queries(model),
    }


def _qwen3(model: Any) -> dict[str, Any]:
    dense = [number for number, layer in enumerate(model.layers) if layer.moe is None]
    if len(dense) == len(model.layers):
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": _dense_width(model)}
        return {**kind, **_grouped_queries(model)}
    mixture = next(layer.moe for layer in model.layers if layer.moe is not None)
    router = mixture.router
    _only("softmax scores without scale, groups and shared experts", {
        "router.score_func": (router.score_func, "softmax"),
        "router.route_scale": (router.route_scale, 1.0),
        "router.num_expert_groups": (router.num_expert_groups, None),
        "shared_experts": (mixture.shared_experts, None),
    })  # fmt: skip
    width = mixture.routed_experts.inner_experts.hidden_dim
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": _dense_width(model, width),
        "moe_intermediate_size": width,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        **_grouped_queries(model),
    }


def _deepseek_v3(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    dense = [layer.moe is None for layer in model.layers]
    first = dense.index(False) if False in dense else len(dense)
    described = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": attention.n_heads,
        **_latent(attention),
        "rope_interleave": True,
        "first_k_dense_replace": first,
    }
    if first == len(dense):
        return {**described, "intermediate_size": _dense_width(model)}
    mixture = model.layers[first].moe
    router, width = mixture.router, mixture.routed_experts.inner_experts.hidden_dim
    _only("shared experts, and dense layers before the mixtures", {
        "shared_experts": (mixture.shared_experts is not None, True),
        "dense layers": (sum(dense), first),
    })  # fmt: skip
    described |= {
        "intermediate_size": _dense_width(model, width),
        "moe_intermediate_size": width,
        "n_routed_experts": mixture.num_experts,
        "n_shared_experts": mixture.shared_experts.w1.out_features // width,
        "num_experts_per_tok": router.top_k,
        "n_group": router.num_expert_groups or 1,
        "topk_group": router.num_limited_groups or 1,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
    }
    if router.score_func == "sigmoid":
        return described
    _only("softmax scores without groups and without normalized weights (DeepSeek-V2), or with sigmoid scores", {
        "router.num_expert_groups": (router.num_expert_groups, None),
        "router.route_norm": (router.route_norm, False),
    })  # fmt: skip
    v2 = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy"}
    return {**described, **v2}


def _gpt_oss(model: Any) -> dict[str, Any]:
    mixture, attention = model.layers[0].moe, model.layers[0].attention
    router, experts = mixture.router, mixture.routed_experts.inner_experts
    windows = [layer.attention.sliding_window_size for layer in model.layers]
    _only("normalized softmax scores, without scale, groups and shared experts, and with one size of windows", {
        "router.score_func": (router.score_func, "softmax"),
        "router.route_norm": (router.route_norm, True),
        "router.route_scale": (router.route_scale, 1.0),
        "router.num_expert_groups": (router.num_expert_groups, None),
        "shared_experts": (mixture.shared_experts, None),
        "sizes of windows": (len(set(windows) - {None}) < 2, True),
    })  # fmt: skip
    rope = _rope(attention)["rope_scaling"]
    if rope is not None:  # without these, queries and keys are scaled by the paper's factor, as in torchtitan
        rope = {key: value for key, value in rope.items() if not key.startswith("mscale")}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": experts.hidden_dim,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": router.top_k,
        "swiglu_limit": experts.swiglu_limit,
        "attention_bias": True,
        # transformers needs one, even if no layer has a window.
        "sliding_window": next((window for window in windows if window is not None), 128),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "rope_scaling": rope,
        **_grouped_queries(model),
    }


def _only(rule: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, wanted) in values.items():
        if value != wanted:
            raise CheckpointError(f"{name}={value}: transformers has this family only with {rule}")


#: By torchtitan's names of its families.
_FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama3": _llama,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}


def check_export(config: Config, spec: ModelSpec) -> None:
    """Check that milestones can be evaluated. Raises a ConfigError if transformers has no such model."""
    if not config.eval.enabled:
        return
    try:
        hugging_face_config(spec)
        adapter_of(spec)
    except CheckpointError as error:
        raise ConfigError(
            f"eval.enabled=true: no checkpoint can be evaluated: {error.message}",
            hint="set eval.enabled=false; checkpoints can't be exported to Hugging Face either",
        ) from None


def counts_of(config: Config) -> dict[str, Any]:
    """Return the counts of the model of ``model.module`` by keys of ``model``, and its shape if they can describe it.

    The model has no storage. torchtitan gives parameters and FLOPs. Parameters that one token uses follow from these:
    6 FLOPs for each of them, apart from an embedding that is only looked up.

    Raises:
        ConfigError: there is no such model, or its code fails.
        DependencyError: the module's package can't be imported.
    """
    from trainer.torchtitan.models import broken, named

    spec = named(config)
    try:
        module: Any = _empty(spec)
        (total, some), (_, more) = (spec.model.get_nparams_and_flops(module, length) for length in (1024, 2048))
        each = (int(more) - int(some)) // 1024
        always = int(some) - 1024 * each
        looked_up = 0 if getattr(spec.model, "enable_weight_tying", False) else module.tok_embeddings.weight.numel()
        counts: dict[str, Any] = {
            "total_parameters": int(total),
            "active_parameters": min(int(total), always // 6 + looked_up),
            "flops_per_token": always,
            "score_flops_per_token": each,
        }
    except (Exception, SystemExit) as error:
        raise broken(config, "its model can't be counted", error) from error
    if counts["active_parameters"] <= 0 or always <= 0 or each < 0:
        raise broken(config, "its model can't be counted", ValueError(f"get_nparams_and_flops gives {counts}"))
    shape = _shape_of(spec.model)
    plain = replace(ModelConfig(), module=config.model.module, flavor=config.model.flavor, **counts)
    with suppress(ConfigError, TypeError, ValueError):
        if shape and has_shape(replace(plain, **shape)):
            return {**counts, **shape}
    return {**counts, "vocab_size": int(spec.model.vocab_size)}


def _shape_of(model: Any) -> dict[str, Any]:
    """Return a model's shape by keys of ``model``; empty if it is built from other parts than torchtitan's families."""
    try:
        attention, mixtures = model.layers[0].attention, [layer.moe for layer in model.layers]
        shape = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "num_layers": len(model.layers),
            "num_heads": attention.n_heads,
            "tie_embeddings": model.enable_weight_tying,
        }
        if hasattr(attention, "kv_lora_rank"):
            shape |= {"num_kv_heads": attention.n_heads, **_latent(attention)}
        else:
            heads = _grouped_queries(model)
            shape |= {"num_kv_heads": heads["num_key_value_heads"], "head_dim": heads["head_dim"]}
            shape["qk_norm"] = "none" if getattr(attention, "qk_norm", None) is None else "head"
        width = 0
        first = next((number for number, mixture in enumerate(mixtures) if mixture is not None), None)
        if first is not None:
            mixture = mixtures[first]
            width, shared = mixture.routed_experts.inner_experts.hidden_dim, mixture.shared_experts
            shape |= {
                "num_experts": mixture.num_experts,
                "experts_per_token": mixture.router.top_k,
                "expert_intermediate_size": width,
                "num_shared_experts": 0 if shared is None else shared.w1.out_features // width,
                "num_dense_layers": first,
            }
        return {**shape, "intermediate_size": _dense_width(model, width)}
    except (AttributeError, IndexError, TypeError, ZeroDivisionError):
        return {}


def named_model(described: dict[str, Any], file: Path) -> ModelConfig:
    """Return the flavor of torchtitan's module that a ``config.json`` describes.

    Raises a CheckpointError if it has no such flavor.
    """
    from trainer.torchtitan.models import flavors, model_spec

    kind = described["model_type"]
    if described.get("quantization_config"):
        raise CheckpointError(
            f"{file}: quantization_config: quantized weights can't be imported",
            hint="load the model with transformers and Mxfp4Config(dequantize=True), and `save_pretrained` it",
        )
    check_kinds(described, file)
    rope, differing = rope_of(described), {}
    rope = {"rope_theta": described.get("rope_theta"), **rope}
    for flavor in flavors(importlib.import_module(f"torchtitan.models.{kind}")):
        model = replace(ModelConfig(), name=file.parent.name, module=kind, flavor=flavor)
        config = replace(Config(), model=model)
        expected = hugging_face_config(model_spec(config))
        expected |= expected.pop("rope_scaling")
        given = {**described, **rope}
        others = [f"{key}={given.get(key)}" for key, value in expected.items() if given.get(key) != value]
        if not others:
            return replace(model, **counts_of(config))
        differing[flavor] = others
    closest = min(differing, key=lambda flavor: len(differing[flavor]))
    raise CheckpointError(
        f"{file}: {', '.join(differing[closest])}: torchtitan's model.module={kind} has no such model",
        hint=f"the closest flavor is {closest}; flavors: {', '.join(differing)}",
    )


def titan_weights(theirs: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Return Hugging Face's weights by torchtitan's names.

    Buffers that only torchtitan has begin at 0. Raises a CheckpointError if a weight is missing, unknown, or has
    another shape.
    """
    try:
        found: dict[str, Tensor] = adapter_of(spec).from_hf(dict(theirs))
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]}: {spec.name} has no such weight") from None
    weights = {}
    for name, expected in _expected(spec).items():
        if name not in found and name.endswith(_BALANCE):
            found[name] = torch.zeros(expected.shape, dtype=expected.dtype)
        if name not in found:
            raise CheckpointError(f"{name}: is missing")
        if found[name].shape != expected.shape:
            raise CheckpointError(f"{name} has shape {tuple(found[name].shape)}, expected {tuple(expected.shape)}")
        weights[name] = found[name].contiguous()
    return weights


def save_titan(theirs: dict[str, Tensor], folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Write Hugging Face's weights as DCP's files; return them. Raises as :func:`titan_weights`."""
    from trainer.torchtitan.models import model_spec

    weights = titan_weights(theirs, model_spec(Config(model=model)))
    dcp.save(weights, folder)
    return weights


def to_dcp(folder: Path, target: Path, config: Config, spec: ModelSpec) -> None:
    """Write a checkpoint of our own format in torchtitan's, with AdamW's moments, into a folder that exists.

    Has the learning rate of the next update, because torchtitan doesn't compute that one when it loads a checkpoint.
    Raises a CheckpointError if the checkpoint has other moments than AdamW's, or its model has another shape.
    """
    tensors, manifest = read_tensors(folder, bool), read_manifest(folder)
    with reading(folder):
        updates = int(files.read_json(folder / "state.json")["optimizer_steps"])
    kinds = {kind: _of_kind(tensors, f"{kind}.") for kind in ("model", *_MOMENTS)}
    for kind in _MOMENTS:
        if lacking := sorted(kinds["model"].keys() - kinds[kind].keys()):
            raise CheckpointError(f"{folder}: {kind}.{lacking[0]} is missing; only AdamW's moments can be converted")
    converted = {kind: titan_weights(to_hugging_face(part, config.model), spec) for kind, part in kinds.items()}
    names = _parameters(spec)
    optimizer: dict[str, Any] = {f"state.{name}.{kind}": converted[kind][name] for kind in _MOMENTS for name in names}
    optimizer |= {f"state.{name}.step": torch.tensor(float(updates)) for name in names}
    optimizer |= {f"param_groups.{name}.lr": learning_rate(updates + 1, config) for name in names}
    state: dict[str, Any] = {
        **converted["model"],
        _OPTIMIZER: optimizer,
        "lr_scheduler": {"last_epoch": updates},
        "train_state": {"step": manifest.step, "ntokens_seen": manifest.tokens},
        "dataloader": {},
    }
    dcp.save(state, target)
    _complete(folder, target)


def from_dcp(folder: Path, target: Path, config: Config, spec: ModelSpec) -> None:
    """Write a checkpoint of torchtitan's in our own format; the inverse of :func:`to_dcp`."""
    metadata = dcp.read_metadata(folder)
    names = _parameters(spec)
    state = _allocated(_described(metadata))
    stored = dcp.describe_tensors(metadata)
    wanted = [f"{_OPTIMIZER}.state.{name}.{kind}" for name in names for kind in _MOMENTS]
    if lacking := [name for name in wanted if name not in stored]:
        raise CheckpointError(f"{folder}: {lacking[0]} is missing; only AdamW's moments can be converted")
    moments = _allocated({name: stored[name][0] for name in wanted})
    dcp.load({**state, **moments}, folder, metadata=metadata)
    adapter = adapter_of(spec)
    tensors = {f"{WEIGHTS}{name}": part for name, part in _ours(adapter.to_hf(state), config.model).items()}
    for kind in _MOMENTS:
        of_kind = {name: moments[f"{_OPTIMIZER}.state.{name}.{kind}"] for name in names}
        of_kind |= dict.fromkeys(_tied(spec), of_kind[_EMBEDDING])
        part = _ours(adapter.to_hf(of_kind), config.model)
        tensors |= {f"{kind}.{name}": tensor for name, tensor in part.items()}
    save_whole(tensors, target)
    _complete(folder, target)


def _parameters(spec: ModelSpec) -> list[str]:
    """Return the names of the parameters, which are those of the state dict: of our shapes none is fused."""
    return [name for name, _ in _empty(spec).named_parameters() if name not in _tied(spec)]


def _allocated(described: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}


def _of_kind(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _ours(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    try:
        return from_hugging_face(theirs, model)
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]}: is missing") from None


def _complete(folder: Path, target: Path) -> None:
    """Copy the other files of a checkpoint, and write the manifest."""
    manifest = read_manifest(folder)
    for entry in manifest.files:
        if entry["path"].endswith(".json"):
            shutil.copyfile(folder / entry["path"], target / entry["path"])
    write_manifest(target, step=manifest.step, tokens=manifest.tokens, world=manifest.world)


def convert(folder: Path, target: Path, config: Config) -> None:
    """Write a verified checkpoint in the format that it doesn't have, atomically.

    Args:
        folder: folder of the checkpoint.
        target: new folder.
        config: has the model.

    Raises a CheckpointError if it is damaged or can't be converted, a StorageError if the target can't be written.
    """
    from trainer.torchtitan.models import model_spec

    if reason := why_invalid(folder):
        raise CheckpointError(f"{folder}: {reason}")
    if config.model.module is not None:
        raise ConfigError(
            f"model.module={config.model.module}: the native engine has no such model",
            hint="only shapes of model.* that both engines have can be converted",
        )
    write = from_dcp if read_manifest(folder).format == "dcp" else to_dcp
    with new_folder(target) as partial:
        write(folder, partial, config, model_spec(config))


def main(argv: list[str] | None = None) -> int:
    """Convert a checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(prog="trainer.convert.torchtitan", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    target = arguments.to.absolute()
    convert(run.checkpoint(arguments.step), target, of_run(run))
    print(json.dumps({"to": os.fspath(target), "format": read_manifest(target).format}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
