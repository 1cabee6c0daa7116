"""torchtitan's models: those of the shapes of ``model.*``, built from torchtitan's own parts, and any by its name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from conf.parametrization import initial_std
from conf.schema import Config, ModelConfig
from hlatctl.run.errors import ConfigError, DependencyError, suggest
from hlatctl.units import one_line
from trainer.torchtitan import float8

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

#: The package of torchtitan's own models, by their short names.
_MODELS = "torchtitan.models"
#: Epsilon of the norms of latent queries, keys and values: in transformers it is no setting of the model.
_LATENT_EPS = 1e-6
#: torchtitan's family by ``model.qk_norm``, or ``latent``: its module, the prefix of its classes, rotary embeddings.
_FAMILIES = {
    "none": ("llama3", "Llama3", "ComplexRoPE"),
    "head": ("qwen3", "Qwen3", "CosSinRoPE"),
    "latent": ("deepseek_v3", "DeepSeekV3", "ComplexRoPE"),
}


def model_spec(config: Config) -> ModelSpec:
    """Return torchtitan's description of the configured model.

    Raises:
        ConfigError: torchtitan has no such module, flavor or family.
        DependencyError: the module's package can't be imported.
    """
    spec = named(config) if config.model.module else _shaped(config.model)
    if config.precision.name == "fp8":
        float8.convert(config, spec)
    return spec


def named(config: Config) -> ModelSpec:
    """Return the flavor of a module: torchtitan's own by its short name, another package's by its full one.

    Raises as :func:`model_spec`.
    """
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
        raise broken(config, "importing it fails", error) from error
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
            raise broken(config, "model_registry fails", error) from error
        raise ConfigError(f"model.flavor={flavor}: {name} has no such model", hint=_flavors(module)) from None
    except (Exception, SystemExit) as error:
        raise broken(config, "model_registry fails", error) from error
    if not hasattr(flavored, "vocab_size") or not hasattr(flavored, "get_nparams_and_flops"):
        raise ConfigError(
            f"model.module={name}: its model_registry returns no language model of torchtitan",
            hint="name the module of a language model, such as model.module=deepseek_v3",
        )
    found: ModelSpec = spec
    return found


def broken(config: Config, what: str, error: BaseException) -> ConfigError:
    """Return an error about foreign code that raised ``error``, whose traceback goes to this process's log."""
    model = config.model
    text = one_line(f"{type(error).__name__}: {error}")
    return ConfigError(
        f"model.module={model.module} model.flavor={model.flavor}: {what} ({text})",
        hint="correct the module, or choose another one",
    )


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
        self.linear = _normal(initial_std("layers.0.attention.qkv.weight", model))

    def norm(self, width: int) -> Any:
        from torchtitan.models.common import RMSNorm

        return RMSNorm.Config(normalized_shape=width, eps=self.model.rms_norm_eps, param_init={"weight": nn.init.ones_})

    def output(self, layer: int) -> dict[str, Any]:
        """Return the initializer of a projection into the residual stream (``model.scaled_initialization``)."""
        return _normal(initial_std(f"layers.{layer}.mlp.down.weight", self.model))

    def rope(self, kind: str, width: int) -> Any:
        from torchtitan.models import common

        model = self.model
        scalings: dict[str, dict[str, Any]] = {
            "none": {},
            "llama3": {
                "scaling": "llama",
                "scaling_factor": model.rope_scaling_factor,
                "low_freq_factor": model.rope_low_freq_factor,
                "high_freq_factor": model.rope_high_freq_factor,
                "original_max_position_embeddings": model.rope_original_seq_len,
            },
            "yarn": {
                "scaling": "yarn",
                "rope_factor": model.rope_scaling_factor,
                "beta_slow": model.rope_beta_slow,
                "beta_fast": model.rope_beta_fast,
                "original_seq_len": model.rope_original_seq_len,
            },
        }
        settings = scalings[model.rope_scaling]
        # The length of the table follows from training.seq_len.
        return getattr(common, kind).Config(dim=width, max_seq_len=1 << 20, theta=model.rope_theta, **settings)

    def attention(self, layer: int, rope: Any) -> Any:
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
            qk_norm=self.norm(model.head_width) if model.qk_norm == "head" else None,
        )

    def latent_attention(self, layer: int, rope: Any) -> Any:
        from torchtitan.models.deepseek_v3 import make_mla_attention_config

        model = self.model
        made = make_mla_attention_config(
            layer_id=layer,
            dim=model.hidden_size,
            n_heads=model.num_heads,
            q_lora_rank=model.q_lora_rank or 0,
            kv_lora_rank=model.kv_lora_rank or 0,
            qk_nope_head_dim=model.qk_nope_head_dim,
            qk_rope_head_dim=model.qk_rope_head_dim,
            v_head_dim=model.v_head_dim,
            attn_backend="flex",
            linear_init=self.linear,
            norm_init={"weight": nn.init.ones_},
            depth_init=self.output,
            rope=rope,
        )
        made.kv_norm.eps = made.q_norm.eps = _LATENT_EPS
        return made

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
        into, out = self.linear["weight"], self.output(layer)["weight"]
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
                param_init={"w1_EFD": into, "w2_EDF": out, "w3_EFD": into},
                comm_backend="standard",
            ),
            shared_experts=self.feed_forward(layer, model.shared_width) if model.num_shared_experts else None,
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

    def decoder(self, kind: Any, layers: list[Any]) -> Any:
        from torchtitan.models.common import Embedding, Linear
        from torchtitan.models.common.param_init import skip_param_init

        model = self.model
        embedding = {"weight": skip_param_init} if model.tie_embeddings else _normal(model.initializer_range)
        head = _normal(initial_std("head.weight", model))
        return kind.Config(
            dim=model.hidden_size,
            vocab_size=model.vocab_size,
            tok_embeddings=Embedding.Config(
                num_embeddings=model.vocab_size, embedding_dim=model.hidden_size, param_init=embedding
            ),
            norm=self.norm(model.hidden_size),
            lm_head=Linear.Config(in_features=model.hidden_size, out_features=model.vocab_size, param_init=head),
            enable_weight_tying=model.tie_embeddings,
            layers=layers,
        )


def _shaped(model: ModelConfig) -> ModelSpec:
    """Return the description of a family, with the shape of ``model.*`` in place of its smallest model's."""
    if model.norm_position != "pre" or model.qk_norm == "all":
        raise ConfigError(
            f"model.norm_position={model.norm_position}, model.qk_norm={model.qk_norm}: torchtitan has no such family",
            hint="OLMo 2 trains with backend=torch_native",
        )
    if model.num_experts and not model.kv_lora_rank and model.qk_norm != "head":
        raise ConfigError(
            f"model.num_experts={model.num_experts}: without model.kv_lora_rank (DeepSeek-V3) torchtitan's mixtures "
            "have norms of queries and keys (Qwen 3)",
            hint="set model.qk_norm=head",
        )
    parts, is_latent = _Parts(model), bool(model.kv_lora_rank)
    name, prefix, rope = _FAMILIES["latent" if is_latent else model.qk_norm]
    family = importlib.import_module(f"{_MODELS}.{name}")
    classes = importlib.import_module(f"{_MODELS}.{name}.model")
    rotary = parts.rope(rope, model.qk_rope_head_dim if is_latent else model.head_width)
    attention = parts.latent_attention if is_latent else parts.attention
    block = getattr(classes, f"{prefix}TransformerBlock")
    layers = [
        block.Config(attention=attention(layer, rotary), **parts.besides_attention(layer))
        for layer in range(model.num_layers)
    ]
    spec: ModelSpec = family.model_registry("debugmodel")
    spec.flavor, spec.model = model.name, parts.decoder(getattr(classes, f"{prefix}Model"), layers)
    return spec
