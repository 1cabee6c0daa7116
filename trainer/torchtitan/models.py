"""torchtitan's models: those of the shapes of ``model.*``, built from torchtitan's own parts, and any by its name."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from conf.schema import Config, ModelConfig
from conf.sizes import has_shape
from hlatctl.run.errors import ConfigError, DependencyError, suggest
from hlatctl.units import one_line
from trainer.torchtitan import float8

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

#: The package of torchtitan's own models, by their short names.
_MODELS = "torchtitan.models"
#: Epsilon of the norms of latent queries, keys and values: in transformers it is no setting of the model.
_LATENT_EPS = 1e-6


def model_spec(config: Config) -> ModelSpec:
    """Return torchtitan's description of the configured model.

    Raises:
        ConfigError: torchtitan has no such module, flavor or family.
        DependencyError: the module's package can't be imported.
    """
    spec = _named(config) if config.model.module else _shaped(config.model)
    if config.precision.name == "fp8":
        float8.convert(config, spec)
    return spec


def _named(config: Config) -> ModelSpec:
    """Return the flavor of a module: torchtitan's own by its short name, another package's by its full one."""
    name, flavor = config.model.module or "", config.model.flavor
    full = name if "." in name else f"{_MODELS}.{name}"
    try:
        module = importlib.import_module(full)
    except ModuleNotFoundError as error:
        if not full.startswith(error.name or full):
            raise DependencyError(
                f"model.module={name}: it imports {error.name}, which is not installed",
                hint="install it where the model is checked and where it trains",
            ) from None
        known = [each.name for each in pkgutil.iter_modules(importlib.import_module(_MODELS).__path__) if each.ispkg]
        hint = suggest(name, known, prefix="model.module=")
        raise ConfigError(f"model.module={name}: there is no module {full}", hint=hint) from None
    except (Exception, SystemExit) as error:
        raise _broken(config, "importing it fails", error) from error
    registry = getattr(module, "model_registry", None)
    if registry is None:
        raise ConfigError(
            f"model.module={name}: it has no function model_registry, as torchtitan's models have",
            hint="name the module of a language model, such as model.module=deepseek_v3",
        )
    if flavor is None:
        raise ConfigError(f"model.flavor=null: {name} has several models", hint=_flavors(module))
    try:
        spec = registry(flavor)
        flavored: Any = spec.model
    except KeyError as error:
        if error.args != (flavor,):
            raise _broken(config, "model_registry fails", error) from error
        raise ConfigError(f"model.flavor={flavor}: {name} has no such model", hint=_flavors(module)) from None
    except (Exception, SystemExit) as error:
        raise _broken(config, "model_registry fails", error) from error
    if not hasattr(flavored, "vocab_size") or not hasattr(flavored, "get_nparams_and_flops"):
        raise ConfigError(
            f"model.module={name}: its model_registry returns no language model of torchtitan",
            hint="name the module of a language model, such as model.module=deepseek_v3",
        )
    found: ModelSpec = spec
    return found


def _broken(config: Config, what: str, error: BaseException) -> ConfigError:
    """Return an error about foreign code that raised ``error``, whose traceback goes to this process's log."""
    model = config.model
    text = one_line(f"{type(error).__name__}: {error}")
    return ConfigError(
        f"model.module={model.module} model.flavor={model.flavor}: {what} ({text})",
        hint="correct the module, or choose another one",
    )


def counts_of(config: Config) -> dict[str, Any]:
    """Return the counts of the model of ``model.module`` by keys of ``model``, and its shape if they can describe it.

    The model has no storage. torchtitan gives parameters and FLOPs. Parameters that one token uses follow from these:
    6 FLOPs for each of them, apart from an embedding that is only looked up.

    Raises:
        ConfigError: there is no such model, or its code fails.
        DependencyError: the module's package can't be imported.
    """
    spec = _named(config)
    try:
        with torch.device("meta"):
            module = spec.model.build()
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
        raise _broken(config, "its model can't be counted", error) from error
    if counts["active_parameters"] <= 0 or always <= 0 or each < 0:
        raise _broken(config, "its model can't be counted", ValueError(f"get_nparams_and_flops gives {counts}"))
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
        dense = [layer.feed_forward.w1.out_features for layer in model.layers if layer.feed_forward is not None]
        shape = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "num_layers": len(model.layers),
            "num_heads": attention.n_heads,
            "tie_embeddings": model.enable_weight_tying,
        }
        if hasattr(attention, "kv_lora_rank"):
            latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            shape |= {key: getattr(attention, key) for key in latent}
            shape |= {"q_lora_rank": attention.q_lora_rank or None, "num_kv_heads": attention.n_heads}
        else:
            shape["num_kv_heads"] = attention.n_kv_heads or attention.n_heads
            shape["head_dim"] = attention.head_dim or model.dim // attention.n_heads
            shape["qk_norm"] = "none" if getattr(attention, "qk_norm", None) is None else "head"
        if any(mixture is not None for mixture in mixtures):
            first = next(number for number, mixture in enumerate(mixtures) if mixture is not None)
            mixture = mixtures[first]
            width = mixture.routed_experts.inner_experts.hidden_dim
            shared = mixture.shared_experts
            shape |= {
                "num_experts": mixture.num_experts,
                "experts_per_token": mixture.router.top_k,
                "expert_intermediate_size": width,
                "num_shared_experts": 0 if shared is None else shared.w1.out_features // width,
                "num_dense_layers": first,
            }
            dense.append(width)
        return {**shape, "intermediate_size": dense[0]}
    except (AttributeError, IndexError, TypeError, ZeroDivisionError):
        return {}


def flavors(module: Any) -> list[str]:
    """Return the flavors of a module that lists them, as torchtitan's own do."""
    tables = [value for key, value in vars(module).items() if key.endswith("_configs") and isinstance(value, dict)]
    return [name for table in tables for name in table]


def _flavors(module: Any) -> str:
    return f"use one of: {', '.join(names)}" if (names := flavors(module)) else ""


def _normal(std: float) -> dict[str, Any]:
    return {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}


class _Parts:
    """The parts that all families share: norms, projections and rotary embeddings of a shape."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.linear = _normal(model.initializer_range)

    def norm(self, width: int) -> Any:
        from torchtitan.models.common import RMSNorm

        return RMSNorm.Config(normalized_shape=width, eps=self.model.rms_norm_eps, param_init={"weight": nn.init.ones_})

    def output(self, layer: int) -> dict[str, Any]:
        """Return the initializer of a projection into the residual stream (``model.scaled_initialization``)."""
        scale = (2 * (layer + 1)) ** -0.5 if self.model.scaled_initialization else 1.0
        return _normal(self.model.initializer_range * scale)

    def rope(self, kind: str, width: int) -> Any:
        from torchtitan.models import common

        model = self.model
        settings: dict[str, Any] = {}
        if model.rope_scaling == "llama3":
            settings = {
                "scaling": "llama",
                "scaling_factor": model.rope_scaling_factor,
                "low_freq_factor": model.rope_low_freq_factor,
                "high_freq_factor": model.rope_high_freq_factor,
                "original_max_position_embeddings": model.rope_original_seq_len,
            }
        # The length of the table follows from training.seq_len.
        return getattr(common, kind).Config(dim=width, max_seq_len=1 << 20, theta=model.rope_theta, **settings)

    def attention(self, layer: int, rope: Any, *, qk_norm: bool) -> Any:
        from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config

        model = self.model
        return make_gqa_config(
            dim=model.hidden_size,
            n_heads=model.num_heads,
            n_kv_heads=model.num_kv_heads,
            head_dim=model.head_width,
            wqkv_param_init=self.linear,
            wo_param_init=self.output(layer),
            inner_attention=get_attention_config("flex"),
            fuse_qkv=False,  # each save would gather the fused weights of all layers on every device (decision 91)
            rope=rope,
            qk_norm=self.norm(model.head_width) if qk_norm else None,
        )

    def feed_forward(self, layer: int, width: int) -> Any:
        from torchtitan.models.common import Linear
        from torchtitan.models.common.feed_forward import FeedForward

        hidden = self.model.hidden_size
        into = {"in_features": hidden, "out_features": width, "param_init": self.linear}
        out = {"in_features": width, "out_features": hidden, "param_init": self.output(layer)}
        return FeedForward.Config(w1=Linear.Config(**into), w2=Linear.Config(**out), w3=Linear.Config(**into))

    def mixture(self, layer: int) -> Any:
        from torchtitan.models.common.config_utils import (
            make_moe_config,
            make_routed_experts_config,
            make_router_config,
        )

        model = self.model
        experts = {"w1_EFD": self.linear, "w2_EDF": self.output(layer), "w3_EFD": self.linear}
        shared = self.feed_forward(layer, model.shared_width) if model.num_shared_experts else None
        return make_moe_config(
            num_experts=model.num_experts,
            router=make_router_config(
                dim=model.hidden_size,
                num_experts=model.num_experts,
                gate_param_init=self.linear,
                top_k=model.experts_per_token,
                score_func=model.router_score,
                route_norm=model.normalize_router_weights,
                route_scale=model.router_scale,
                num_expert_groups=model.router_groups,
                num_limited_groups=model.router_limited_groups,
            ),
            routed_experts=make_routed_experts_config(
                dim=model.hidden_size,
                hidden_dim=model.expert_width,
                num_experts=model.num_experts,
                top_k=model.experts_per_token,
                param_init={name: init["weight"] for name, init in experts.items()},
                comm_backend="standard",
            ),
            shared_experts=shared,
        )

    def besides_attention(self, layer: int) -> dict[str, Any]:
        """Return the norms of a layer, and its feed-forward layer or experts."""
        model = self.model
        wide = model.is_mixture(layer)
        return {
            "attention_norm": self.norm(model.hidden_size),
            "ffn_norm": self.norm(model.hidden_size),
            "feed_forward": None if wide else self.feed_forward(layer, model.intermediate_size),
            "moe": self.mixture(layer) if wide else None,
        }

    def decoder(self, kind: Any, layers: list[Any], **others: Any) -> Any:
        from torchtitan.models.common import Embedding, Linear
        from torchtitan.models.common.param_init import skip_param_init

        model = self.model
        embedding = {"weight": skip_param_init} if model.tie_embeddings else self.linear
        return kind.Config(
            dim=model.hidden_size,
            vocab_size=model.vocab_size,
            tok_embeddings=Embedding.Config(
                num_embeddings=model.vocab_size, embedding_dim=model.hidden_size, param_init=embedding
            ),
            norm=self.norm(model.hidden_size),
            lm_head=Linear.Config(in_features=model.hidden_size, out_features=model.vocab_size, param_init=self.linear),
            enable_weight_tying=model.tie_embeddings,
            layers=layers,
            **others,
        )


def _llama(model: ModelConfig) -> ModelSpec:
    from torchtitan.models import llama3
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    parts = _Parts(model)
    rope = parts.rope("ComplexRoPE", model.head_width)
    layers = [
        Llama3TransformerBlock.Config(
            attention=parts.attention(layer, rope, qk_norm=False), **parts.besides_attention(layer)
        )
        for layer in range(model.num_layers)
    ]
    return _replace(llama3.model_registry("debugmodel"), model, parts.decoder(llama3.Llama3Model, layers))


def _qwen3(model: ModelConfig) -> ModelSpec:
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    parts = _Parts(model)
    rope = parts.rope("CosSinRoPE", model.head_width)
    layers = [
        Qwen3TransformerBlock.Config(
            attention=parts.attention(layer, rope, qk_norm=True), **parts.besides_attention(layer)
        )
        for layer in range(model.num_layers)
    ]
    return _replace(qwen3.model_registry("debugmodel"), model, parts.decoder(qwen3.Qwen3Model, layers))


def _deepseek_v3(model: ModelConfig) -> ModelSpec:
    from torchtitan.models import deepseek_v3
    from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock

    parts = _Parts(model)
    rope = parts.rope("ComplexRoPE", model.qk_rope_head_dim)

    def attention(layer: int) -> Any:
        made = deepseek_v3.make_mla_attention_config(
            layer_id=layer,
            dim=model.hidden_size,
            n_heads=model.num_heads,
            q_lora_rank=model.q_lora_rank or 0,
            kv_lora_rank=model.kv_lora_rank or 0,
            qk_nope_head_dim=model.qk_nope_head_dim,
            qk_rope_head_dim=model.qk_rope_head_dim,
            v_head_dim=model.v_head_dim,
            attn_backend="flex",
            linear_init=parts.linear,
            norm_init={"weight": nn.init.ones_},
            depth_init=parts.output,
            rope=rope,
        )
        made.kv_norm.eps = made.q_norm.eps = _LATENT_EPS
        return made

    layers = [
        DeepSeekV3TransformerBlock.Config(attention=attention(layer), **parts.besides_attention(layer))
        for layer in range(model.num_layers)
    ]
    return _replace(deepseek_v3.model_registry("debugmodel"), model, parts.decoder(deepseek_v3.DeepSeekV3Model, layers))


def _replace(spec: ModelSpec, model: ModelConfig, shape: Any) -> ModelSpec:
    """Return a family's description with another shape."""
    spec.flavor, spec.model = model.name, shape
    return spec


def _shaped(model: ModelConfig) -> ModelSpec:
    if model.norm_position != "pre" or model.qk_norm == "all":
        raise ConfigError(
            f"model.norm_position={model.norm_position}, model.qk_norm={model.qk_norm}: torchtitan has no such family",
            hint="OLMo 2 trains with backend=torch_native",
        )
    if model.kv_lora_rank:
        return _deepseek_v3(model)
    if model.qk_norm == "head":
        return _qwen3(model)
    if model.num_experts:
        raise ConfigError(
            f"model.num_experts={model.num_experts}: without model.kv_lora_rank (DeepSeek-V3) torchtitan's mixtures "
            "have norms of queries and keys (Qwen 3)",
            hint="set model.qk_norm=head",
        )
    return _llama(model)
