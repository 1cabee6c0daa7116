"""Rules about the model's shape and its layout: backend, device, split of the model, batches and pipelines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from conf.devices import DEVICES
from conf.environment import CASTING
from conf.registries import BACKENDS, Trait
from conf.schema import Config, ModelConfig
from conf.sizes import has_shape, parameters
from hlatctl.run.errors import ConfigError

#: 256 bytes, the special tokens, and room for a few merges.
_MIN_TRAIN_VOCAB_SIZE = 300


def _model(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if model.kv_lora_rank is not None:
        yield from _latent(config)
    elif model.head_dim is None and model.hidden_size % model.num_heads:
        yield _indivisible("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    elif model.head_width % 2:
        key, value = ("hidden_size", model.hidden_size) if model.head_dim is None else ("head_dim", model.head_dim)
        yield ConfigError(
            f"model.{key}={value}: gives heads of width {model.head_width} with model.num_heads={model.num_heads}; "
            "rotary embeddings need an even width",
            hint=f"set model.head_dim={model.head_width + 1}",
        )
    if model.num_heads % model.num_kv_heads:
        yield _indivisible("model.num_heads", model.num_heads, "model.num_kv_heads", model.num_kv_heads)
    if (model.qk_norm == "all") != (model.norm_position == "post"):
        yield ConfigError(
            f"model.qk_norm={model.qk_norm}: with model.norm_position={model.norm_position} no format for exports "
            "describes the model",
            hint="set model.norm_position=pre with model.qk_norm=none (LLaMA) or model.qk_norm=head (Qwen 3), or "
            "model.norm_position=post with model.qk_norm=all (OLMo 2)",
        )
    yield from _rotary(model)
    trained = config.tokenizer.train_vocab_size
    if config.tokenizer.path is None and trained > model.vocab_size:
        yield ConfigError(
            f"tokenizer.train_vocab_size={trained}: does not fit model.vocab_size={model.vocab_size}",
            # A flavor of model.module has its own vocabulary.
            hint=f"set tokenizer.train_vocab_size={model.vocab_size} or less"
            if model.module
            else f"set model.vocab_size={trained} or more",
        )
    if config.tokenizer.path is None and trained < _MIN_TRAIN_VOCAB_SIZE:
        yield ConfigError(
            f"tokenizer.train_vocab_size={trained}: byte-level BPE needs at least {_MIN_TRAIN_VOCAB_SIZE}"
        )


def _rotary(model: ModelConfig) -> Iterator[ConfigError]:
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling == "llama3" and low >= high:
        yield ConfigError(
            f"model.rope_low_freq_factor={low:g}: must be below model.rope_high_freq_factor={high:g}",
            hint="Llama 3.1 has model.rope_low_freq_factor=1 model.rope_high_freq_factor=4",
        )
    slow, fast = model.rope_beta_slow, model.rope_beta_fast
    if model.rope_scaling == "yarn" and slow >= fast:
        yield ConfigError(
            f"model.rope_beta_slow={slow:g}: must be below model.rope_beta_fast={fast:g}",
            hint="the paper has model.rope_beta_slow=1 model.rope_beta_fast=32",
        )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        yield ConfigError(
            f"model.rope_theta={model.rope_theta:g}: model.rope_scaling=yarn needs more than 1, so that frequencies "
            "differ",
            hint="set model.rope_theta=10000, or that of the checkpoint",
        )


def _mup(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if model.mup_base_width is None:
        return
    here, off = f"model.mup_base_width={model.mup_base_width}", "set model.mup_base_width=null"
    others = {
        f"model.module={model.module}": model.module is not None,
        f"model.num_experts={model.num_experts}": model.num_experts > 0,
        f"model.kv_lora_rank={model.kv_lora_rank}": model.kv_lora_rank is not None,
    }
    for other in (name for name, is_set in others.items() if is_set):
        yield not_together(here, other, "its rules are those of dense models with grouped-query attention", hint=off)
    if model.tie_embeddings:
        yield not_together(
            here,
            "model.tie_embeddings=true",
            "the learning rate of an output projection follows the width, that of an embedding doesn't",
            hint="set model.tie_embeddings=false",
        )


def _latent(config: Config) -> Iterator[ConfigError]:
    model = config.model
    here = f"model.kv_lora_rank={model.kv_lora_rank}"
    if model.qk_rope_head_dim % 2:
        yield ConfigError(
            f"model.qk_rope_head_dim={model.qk_rope_head_dim}: rotary embeddings need an even width",
            hint=f"set model.qk_rope_head_dim={model.qk_rope_head_dim + 1}",
        )
    if model.qk_norm != "none":
        yield not_together(
            here,
            f"model.qk_norm={model.qk_norm}",
            "latent attention has norms of its own",
            hint="set model.qk_norm=none",
        )
    if model.num_kv_heads != model.num_heads:
        yield ConfigError(
            f"model.num_kv_heads={model.num_kv_heads}: latent attention ({here}) has as many key heads as "
            f"model.num_heads={model.num_heads}",
            hint=f"set model.num_kv_heads={model.num_heads}",
        )


def _module(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if model.module is None:
        return
    if not model.module or not model.flavor:
        key = "flavor" if model.module else "module"
        yield ConfigError(
            f"model.{key}={getattr(model, key) or ''}: a model of a module needs both names",
            hint="model.module=deepseek_v3 model.flavor=16B is one of torchtitan's",
        )
        return
    try:
        counts = parameters(model)
    except ConfigError as error:
        yield error
        return
    if counts.active > counts.total:
        yield ConfigError(
            f"model.active_parameters={counts.active}: more than model.total_parameters={counts.total}",
            hint="leave model.active_parameters out if a token uses all of them",
        )
    if not has_shape(model) and _shape(config) != _shape(Config()):
        yield ConfigError(
            f"model.total_parameters={model.total_parameters}: differs from what the other keys of the shape describe; "
            f"they are for the planner and don't change model.flavor={model.flavor}",
            hint="leave them out, or set those of the flavor: model.hidden_size, model.num_layers, and so on",
        )


def _shape(config: Config) -> tuple[int, ...]:
    model = config.model
    return (model.hidden_size, model.intermediate_size, model.num_layers, model.num_experts)


def _experts(config: Config) -> Iterator[ConfigError]:
    model, kind = config.model, config.backend.kind
    needing = {
        f"model.module={model.module}": model.module is not None,
        f"model.num_experts={model.num_experts}": model.num_experts > 0,
        f"model.kv_lora_rank={model.kv_lora_rank}": model.kv_lora_rank is not None,
    }
    for key in (key for key, is_set in needing.items() if is_set and "experts" not in kind.traits):
        yield ConfigError(
            f"{key}: backend.name={config.backend.name} trains dense models of this project's shapes only",
            hint="set backend=torchtitan, or a dense model such as model=qwen3_8b",
        )
    size = config.parallel.expert_parallel_size
    if model.num_experts:
        yield from _mixture(config)
    elif size > 1 and has_shape(model):
        yield ConfigError(
            f"parallel.expert_parallel_size={size}: needs a mixture of experts, but model.num_experts=0",
            hint="set parallel.expert_parallel_size=1",
        )


def _mixture(config: Config) -> Iterator[ConfigError]:
    model, parallel, experts = config.model, config.parallel, config.model.num_experts
    if model.experts_per_token > experts:
        yield ConfigError(
            f"model.experts_per_token={model.experts_per_token}: more than model.num_experts={experts}",
            hint=f"set model.experts_per_token={min(2, experts)}",
        )
    if model.num_dense_layers >= model.num_layers:
        yield ConfigError(
            f"model.num_dense_layers={model.num_dense_layers}: leaves no layer of model.num_layers={model.num_layers} "
            "for experts",
            hint="set fewer dense layers, or model.num_experts=0",
        )
    yield from _router_groups(config)
    size, tensor = parallel.expert_parallel_size, parallel.tensor_parallel_size
    widths = {"model.intermediate_size": model.intermediate_size, "model.expert_intermediate_size": model.expert_width}
    key = "model.expert_intermediate_size" if model.expert_intermediate_size else "model.intermediate_size"
    if size == 1 and widths[key] % tensor:
        yield _indivisible(key, widths[key], "parallel.tensor_parallel_size", tensor)
    if size > 1 and config.train.seq_len % tensor:  # each of them sends its part of the sequence
        yield _indivisible("train.seq_len", config.train.seq_len, "parallel.tensor_parallel_size", tensor)
    if experts % size:
        yield _indivisible("model.num_experts", experts, "parallel.expert_parallel_size", size)
        return
    sharing = _sharing(config)
    if sharing * tensor % size:
        yield ConfigError(
            f"parallel.expert_parallel_size={size}: must divide the {sharing} processes that share the weights x "
            f"parallel.tensor_parallel_size={tensor}",
            hint=f"use a divisor of {math.gcd(sharing * tensor, experts)}"
            + ("" if parallel.data_parallel == "fsdp" else ", or set parallel.data_parallel=fsdp"),
        )


def _sharing(config: Config) -> int:
    """Return the number of processes that share one copy of the weights, apart from tensor parallelism."""
    parallel = config.parallel
    if parallel.data_parallel == "replicate":
        return parallel.context_parallel_size
    return parallel.fsdp_size or config.weight_replicas


def _router_groups(config: Config) -> Iterator[ConfigError]:
    model = config.model
    groups, chosen = model.router_groups, model.router_limited_groups
    if groups is None:
        return
    here = f"model.router_groups={groups}"
    if model.num_experts % groups or model.num_experts // groups < 2:
        yield ConfigError(
            f"{here}: must divide model.num_experts={model.num_experts} into groups of at least 2",
            hint="model.router_groups=null has no groups",
        )
    elif chosen is None or chosen > groups:
        yield ConfigError(
            f"model.router_limited_groups={chosen}: must be from 1 to {here}",
            hint=f"set model.router_limited_groups={max(1, groups // 2)}",
        )
    elif model.experts_per_token > chosen * (model.num_experts // groups):
        yield ConfigError(
            f"model.experts_per_token={model.experts_per_token}: model.router_limited_groups={chosen} groups have only "
            f"{chosen * (model.num_experts // groups)} experts",
            hint=f"set model.router_limited_groups={groups}",
        )


def _ignored(config: Config) -> Iterator[ConfigError]:
    for key in config.backend.kind.ignores:
        value, default = attrgetter(key)(config), attrgetter(key)(_DEFAULTS)
        if value != default:
            shown = str(default).lower() if isinstance(default, bool) or default is None else default
            yield ConfigError(
                f"{key}={value}: backend.name={config.backend.name} doesn't read this key",
                hint=f"set {key}={'null' if default is None else shown}",
            )


_DEFAULTS = Config()


def _parallel(config: Config) -> Iterator[ConfigError]:
    parallel, model = config.parallel, config.model
    tensor, stages, context = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
    )
    needed = tensor * stages * context
    if config.world_size % needed:
        factors = f"parallel.tensor_parallel_size={tensor} x parallel.pipeline_parallel_size={stages}"
        if context > 1:
            factors += f" x parallel.context_parallel_size={context}"
        yield ConfigError(
            f"{factors} = {needed}: does not divide the {config.world_size} processes (cluster.nodes x "
            "cluster.processes_per_node)",
            hint=f"use a multiple of {needed} processes",
        )
    keys = ["num_kv_heads", "num_heads", "intermediate_size", "vocab_size"]
    if model.num_experts and not model.num_dense_layers:
        keys.remove("intermediate_size")
    for key in keys if has_shape(model) else ():
        # If there are fewer key/value heads than processes, NxD copies each head to several processes.
        copied = key == "num_kv_heads" and _has(config, "copies_kv_heads") and tensor % model.num_kv_heads == 0
        if getattr(model, key) % tensor and not copied:
            yield _indivisible(f"model.{key}", getattr(model, key), "parallel.tensor_parallel_size", tensor)
    if parallel.sequence_parallel and tensor == 1:
        yield ConfigError(
            "parallel.sequence_parallel=true: splits the sequence over tensor-parallel processes, but "
            "parallel.tensor_parallel_size=1",
            hint="set parallel.tensor_parallel_size, or parallel.sequence_parallel=false",
        )
    if context == 1 and parallel.sequence_parallel and config.train.seq_len % tensor:
        yield _indivisible("train.seq_len", config.train.seq_len, "parallel.tensor_parallel_size", tensor)


def _context_parallel(config: Config) -> Iterator[ConfigError]:
    """Require two equal chunks of a sequence per process, which sequence parallelism divides (torchtitan.trainer)."""
    parallel = config.parallel
    size = parallel.context_parallel_size
    if size == 1:
        return
    here = f"parallel.context_parallel_size={size}"
    if not _has(config, "context_parallel"):
        yield _needs_torchtitan(config, here, "set parallel.context_parallel_size=1")
    tensor = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    parts = 2 * size * tensor
    if config.train.seq_len % parts:
        also = f" x parallel.tensor_parallel_size={tensor}" if tensor > 1 else ""
        yield ConfigError(
            f"train.seq_len={config.train.seq_len}: must be divisible by twice {here}{also}",
            hint=f"use a multiple of {parts}",
        )


def _backend(config: Config) -> Iterator[ConfigError]:
    name, device, layout = config.backend.name, config.backend.device, config.parallel.data_parallel
    kind, devices = config.backend.kind, config.backend.kind.devices
    if devices and device not in devices:
        yield ConfigError(
            f"backend.device={device}: backend.name={name} trains on {' or '.join(devices)}",
            hint=f"set backend.device={devices[0]}, or backend=torch_native",
        )
    if layout not in kind.data_parallel:
        yield ConfigError(
            f"parallel.data_parallel={layout}: backend.name={name} doesn't support it",
            hint=f"set parallel.data_parallel={kind.data_parallel[-1]}",
        )
    precisions, precision = kind.state_bytes, config.precision.name
    if precision not in precisions and precision != "fp8":  # has a rule of its own
        yield ConfigError(
            f"precision.name={precision}: backend.name={name} doesn't support it",
            hint=f"set precision.name to one of: {', '.join(precisions)}",
        )
    if (optimizers := kind.optimizers) and config.optimizer.name not in optimizers:
        yield ConfigError(
            f"optimizer.name={config.optimizer.name}: backend.name={name} doesn't support it, torch_native does",
            hint=f"set optimizer.name={optimizers[0]}, or backend=torch_native",
        )


def _sharding(config: Config) -> Iterator[ConfigError]:
    parallel, replicas = config.parallel, config.weight_replicas
    if parallel.reshard_after_forward == "never" and parallel.data_parallel != "fsdp":
        yield ConfigError(
            f"parallel.reshard_after_forward=never: parallel.data_parallel={parallel.data_parallel} gathers weights "
            "only once per step anyway",
            hint="set parallel.data_parallel=fsdp, or parallel.reshard_after_forward=always",
        )
    if parallel.fsdp_size is None:
        return
    here = f"parallel.fsdp_size={parallel.fsdp_size}"
    if not _has(config, "fsdp_size") or parallel.data_parallel == "replicate":
        yield ConfigError(
            f"{here}: only for {_backends('fsdp_size')} with parallel.data_parallel=fsdp or zero1, but here they are "
            f"{config.backend.name} and {parallel.data_parallel}",
            hint="set parallel.fsdp_size=null, or parallel.data_parallel=fsdp and backend=torch_native",
        )
    elif replicas % parallel.fsdp_size:
        yield ConfigError(
            f"{here}: data-parallel x context-parallel size {replicas} is not divisible by it",
            hint=f"use a divisor of {replicas}, such as the number of replicas of a node",
        )


def _fp8(config: Config) -> Iterator[ConfigError]:
    """Require a device with FP8 products, and sizes that are multiples of 16."""
    if config.precision.name != "fp8":
        if (scaling := config.precision.fp8_scaling) != "rowwise":
            yield ConfigError(
                f"precision.fp8_scaling={scaling}: precision.name={config.precision.name} has no FP8 products",
                hint="set precision=fp8, or precision.fp8_scaling=rowwise",
            )
        return
    if not _has(config, "fp8"):
        yield _needs_torchtitan(config, "precision.name=fp8", "set precision=mixed")
    if DEVICES[config.backend.device].fp8_capability is None:
        yield ConfigError(
            f"precision.name=fp8: backend.device={config.backend.device} has no FP8 products",
            hint="set precision=mixed, or backend.device=cuda",
        )
    yield from _fp8_sizes(config)


def _fp8_sizes(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each size of a product that is not a multiple of 16, as ``torch._scaled_mm`` requires."""
    model, parallel = config.model, config.parallel
    tensor, tokens = parallel.tensor_parallel_size, config.micro_batch_size * config.train.seq_len
    sizes = {
        f"model.hidden_size={model.hidden_size}": model.hidden_size,
        f"model.intermediate_size={model.intermediate_size}": model.intermediate_size // tensor,
        f"model.num_heads={model.num_heads}": model.query_width // tensor,
        f"model.num_kv_heads={model.num_kv_heads}": model.kv_width // tensor,
        f"train.seq_len={config.train.seq_len}": tokens // parallel.context_parallel_size,
    }
    if model.num_experts:
        sizes[f"model.expert_intermediate_size={model.expert_width}"] = model.expert_width // tensor
    for key, size in sizes.items():
        if size % 16:
            yield ConfigError(
                f"{key}: gives products of size {size} with parallel.tensor_parallel_size={tensor}; "
                "precision.name=fp8 needs multiples of 16",
                hint="set precision=mixed",
            )


def _recomputation(config: Config) -> Iterator[ConfigError]:
    level, backend = config.parallel.activation_checkpointing, config.backend
    here = f"parallel.activation_checkpointing={level}"
    if level in ("operators", "budget") and not _has(config, "recomputes_operators"):
        yield _needs_torchtitan(config, here, "set parallel.activation_checkpointing=selective")
    elif level == "budget" and (not backend.compile or DEVICES[backend.device].compile_backend != "inductor"):
        yield ConfigError(
            f"{here}: Inductor chooses what to recompute, but here backend.device={backend.device} "
            f"and backend.compile={str(backend.compile).lower()}",
            hint="set parallel.activation_checkpointing=operators",
        )


def _of_backend(config: Config) -> Iterator[ConfigError]:
    if rules := BACKENDS.part(config.backend.name, "rules"):
        yield from rules(config)


def _of_foreign_loss(config: Config, here: str) -> Iterator[ConfigError]:
    if config.train.z_loss:
        yield not_together(here, f"train.z_loss={config.train.z_loss:g}", "its cross-entropy has no such term")
    if config.train.on_nonfinite == "skip":
        yield ConfigError(
            f"train.on_nonfinite=skip: with {here}, the update happens before the loss is known",
            hint="set train.on_nonfinite=rollback",
        )
    if config.train.on_spike == "skip":
        yield ConfigError(
            f"train.on_spike=skip: with {here}, the update happens before the loss is known",
            hint="leave train.on_spike=keep; `hlatctl data skip` excludes a bad batch",
        )


def of_torchtitan(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each rule of torchtitan's that a configuration breaks."""
    here, model, parallel = f"backend.name={config.backend.name}", config.model, config.parallel
    yield from _of_foreign_loss(config, here)
    if model.norm_position != "pre":
        yield not_together(here, f"model.norm_position={model.norm_position}", "it has no such family")
    if parallel.activation_checkpointing == "selective":
        yield ConfigError(
            f"parallel.activation_checkpointing=selective: {here} can't recompute only the core of attention",
            hint="set parallel.activation_checkpointing=operators, which torchtitan calls selective",
        )
    # torchtitan's grouped-query attention has no temperature, and the rotation of its Qwen 3 no other scaling.
    if (
        model.module is None
        and model.kv_lora_rank is None
        and model.rope_scaling not in (("none", "llama3") if model.qk_norm == "none" else ("none",))
    ):
        yield not_together(
            here,
            f"model.rope_scaling={model.rope_scaling}",
            "torchtitan has llama3 for LLaMA and latent attention, and yarn for latent attention (DeepSeek-V3) only",
            hint="set backend=torch_native, or extend the context with model.rope_theta",
        )
    decay, stages = config.optimizer.decay, parallel.pipeline_parallel_size
    if model.mup_base_width is not None and decay != "all" and stages > 1:
        yield not_together(
            f"model.mup_base_width={model.mup_base_width}",
            f"optimizer.decay={decay}",
            f"{here} needs parameters of every kind in each of its {stages} pipeline stages, and only one has an "
            "embedding",
            hint="set optimizer.decay=all, or parallel.pipeline_parallel_size=1",
        )
    if model.module is None and model.num_experts and model.kv_lora_rank is None:
        yield from _qwen_mixture(config)


def _qwen_mixture(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each key that Qwen 3's mixtures, the ones with grouped-query attention, don't have."""
    only = {
        "qk_norm": "head",
        "num_shared_experts": 0,
        "num_dense_layers": 0,
        "router_score": "softmax",
        "router_groups": None,
    }
    for key, value in only.items():
        if (given := getattr(config.model, key)) != value:
            yield ConfigError(
                f"model.{key}={given}: with model.num_experts={config.model.num_experts} and no latent attention, no "
                "format for exports describes the model",
                hint=f"set model.{key}={'null' if value is None else value} (Qwen 3), or model.kv_lora_rank (DeepSeek)",
            )


def of_nxd(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each rule of NxD's that a configuration breaks."""
    here = f"backend.name={config.backend.name}"
    if config.precision.name == "mixed" and config.parallel.data_parallel != "zero1":
        yield ConfigError(
            f"precision.name=mixed: with {here}, FP32 master weights need parallel.data_parallel=zero1, but "
            f"parallel.data_parallel={config.parallel.data_parallel}",
            hint="set parallel.data_parallel=zero1",
        )
    if config.model.tie_embeddings:
        yield not_together(here, "model.tie_embeddings=true", "embedding and head are separate layers")
    if config.model.qk_norm != "none":
        yield not_together(
            here, f"model.qk_norm={config.model.qk_norm}", "its tensor-parallel processes don't exchange these norms"
        )
    yield from _of_foreign_loss(config, here)
    for name in CASTING:
        value = config.backend.env.get(name)
        if value is not None:
            yield ConfigError(
                f"backend.env.{name}={value}: must be unset; any value, also 0, changes number formats independently "
                f"of precision.name={config.precision.name}",
                hint=f"backend.env.{name}=null selects number formats by precision.name alone",
            )


def _batches(config: Config) -> Iterator[ConfigError]:
    train, replicas = config.train, config.data_parallel_size
    if train.global_batch_size % replicas:
        yield _indivisible(
            "train.global_batch_size",
            train.global_batch_size,
            "the data-parallel size",
            replicas,
            hint=f"use a multiple of {replicas}, or change cluster.processes_per_node",
        )
    elif train.micro_batch_size and train.global_batch_size % (train.micro_batch_size * replicas):
        yield ConfigError(
            f"train.global_batch_size={train.global_batch_size}: not divisible by train.micro_batch_size="
            f"{train.micro_batch_size} x data-parallel size {replicas} = {train.micro_batch_size * replicas}",
            hint=f"use a train.micro_batch_size that divides {train.global_batch_size // replicas}",
        )


def _has(config: Config, trait: Trait) -> bool:
    return trait in config.backend.kind.traits


def _needs_torchtitan(config: Config, here: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{here}: backend.name={config.backend.name} doesn't support it", hint=f"{remedy}, or backend=torchtitan"
    )


def _backends(trait: Trait) -> str:
    return f"backend.name={' or '.join(name for name, kind in BACKENDS.built_in.items() if trait in kind.traits)}"


def not_together(one: str, other: str, why: str, *, hint: str = "change one of them") -> ConfigError:
    """Return the error for two settings that can't be combined, with the reason."""
    return ConfigError(f"{one} and {other}: can't be combined; {why}", hint=hint)


def _indivisible(key: str, value: int, other_key: str, other: int, *, hint: str = "") -> ConfigError:
    return ConfigError(
        f"{key}={value}: not divisible by {other_key}={other}", hint=hint or f"use a multiple of {other}"
    )


#: Each yields an error for every rule that the configuration breaks.
RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (
    _model,
    _mup,
    _module,
    _experts,
    _backend,
    _ignored,
    _of_backend,
    _parallel,
    _context_parallel,
    _sharding,
    _batches,
    _fp8,
    _recomputation,
)


def _pipeline(config: Config) -> Iterator[ConfigError]:
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return
    here = f"parallel.pipeline_parallel_size={stages}"
    if stages > config.model.num_layers:
        yield ConfigError(
            f"{here}: more stages than model.num_layers={config.model.num_layers}",
            hint=f"use at most {config.model.num_layers} stages",
        )
    if config.data.mask_across_documents and not _has(config, "masks_in_stages"):
        yield not_together(
            here,
            "data.mask_across_documents=true",
            "later stages don't see the tokens",
            hint="set data.mask_across_documents=false, or backend=torch_native",
        )
    if config.model.tie_embeddings:
        yield not_together(
            here,
            "model.tie_embeddings=true",
            "the first and last stage would share a weight",
            hint="set model.tie_embeddings=false, or parallel.pipeline_parallel_size=1",
        )
    if config.grad_accum_steps < stages:
        yield ConfigError(
            f"{here}: needs at least {stages} micro-batches per step, but there are {config.grad_accum_steps} "
            f"(train.global_batch_size={config.train.global_batch_size} / data-parallel size "
            f"{config.data_parallel_size} / micro batch {config.micro_batch_size})",
            hint=_more_micro_batches(config, stages),
        )


def _sharded_stages(config: Config) -> Iterator[ConfigError]:
    """FSDP of pipeline stages can be planned, because others train with it, but this project's loop can't run it."""
    stages, layout = config.parallel.pipeline_parallel_size, config.parallel.data_parallel
    if stages > 1 and layout != "replicate" and not _has(config, "shards_stages"):
        yield not_together(
            f"parallel.pipeline_parallel_size={stages}",
            f"parallel.data_parallel={layout}",
            f"backend.name={config.backend.name} would gather the weights again in every micro-batch",
            hint="set parallel.data_parallel=replicate, or parallel.pipeline_parallel_size=1",
        )


def _schedule(config: Config) -> Iterator[ConfigError]:
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.pipeline_schedule == "1f1b":
        return
    here = f"parallel.pipeline_schedule={parallel.pipeline_schedule}"
    processes, stages = parallel.pipeline_parallel_size, parallel.pipeline_parallel_size * parallel.pipeline_chunks
    if not _has(config, "interleaves"):
        yield _needs_torchtitan(config, here, "set parallel.pipeline_schedule=1f1b")
    if processes == 1:
        yield ConfigError(
            f"{here}: needs several pipeline-parallel processes, but parallel.pipeline_parallel_size=1",
            hint="set parallel.pipeline_schedule=1f1b",
        )
    elif stages > layers:
        yield ConfigError(
            f"{here}: parallel.pipeline_parallel_size={processes} x parallel.pipeline_chunks="
            f"{parallel.pipeline_chunks} are more stages than model.num_layers={layers}",
            hint="set parallel.pipeline_schedule=1f1b, or fewer chunks",
        )
    rounds = max(1, config.grad_accum_steps // processes)
    if config.grad_accum_steps % rounds:
        yield ConfigError(
            f"{here}: the {config.grad_accum_steps} micro-batches of a step can't be divided into {rounds} equal "
            f"rounds of at least parallel.pipeline_parallel_size={processes}",
            hint=_more_micro_batches(config, processes, config.grad_accum_steps),
        )


def _more_micro_batches(config: Config, processes: int, least: int = 1) -> str:
    """Return the change that gives a step a multiple of this many micro-batches, and at least ``least`` of them."""
    replicas, batch = config.data_parallel_size, config.train.global_batch_size
    own = batch // replicas
    fitting = (size for size in range(own, 0, -1) if not own % size and not own // size % processes)
    micro = next((size for size in fitting if own // size >= least), None)
    if micro:
        return f"set train.micro_batch_size={micro}"
    multiple = processes * replicas
    larger = -(-batch // multiple) * multiple
    return f"set train.global_batch_size={larger} train.micro_batch_size=1, or fewer pipeline-parallel processes"


#: Each yields an error for every rule that the configuration breaks.
PIPELINE_RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (_pipeline, _schedule)
#: Rules for layouts that can be planned but not trained.
UNSUPPORTED: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (_sharded_stages,)
