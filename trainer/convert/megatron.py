"""Read and write checkpoints of Megatron-LM and Megatron-Bridge, and read other trainers' DCP checkpoints.

Megatron's format ``torch_dist`` is a DCP checkpoint. Names and layouts are those of megatron-core 0.16.1 and of
NVIDIA/Megatron-LM d98e8a6 (2026-08-22), which were run here on a CPU:

- A tensor of all layers is stacked on its first dimension, ``decoder.layers.mlp.linear_fc2.weight``, or each layer has
  its own, ``decoder.layers.7.mlp.linear_fc2.weight`` (``non_homogeneous_layers``).
- ``linear_qkv`` has the queries of a group, its key and its value, group after group: the layout of our own matrix.
- ``linear_fc1`` has all gates and then all ups; norms belong to the matrix that follows them.
- Embedding and head may have rows that fill the vocabulary up to a multiple; these are dropped.
- The model's settings are in ``run_config.yaml`` (Megatron-Bridge), or are ``args`` (Megatron-LM) in ``common.pt``, and
  in newer versions in the state ``common_state``.
- ``_extra_state`` belongs to Transformer Engine. It is not read.

Other trainers' checkpoints have Hugging Face's names or torchtitan's, and need a ``config.json``.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from conf.load import parse_yaml
from conf.schema import Config, ModelConfig
from hlatctl.run import files
from hlatctl.run.errors import CheckpointError
from hlatctl.run.files import DAMAGED, read_bytes, why
from trainer.checkpoint import dcp
from trainer.convert.hugging_face import (
    Parts,
    Weights,
    empty_weights,
    family_of,
    join_qkv,
    model_config,
    split_qkv,
    to_hugging_face,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_TOP = {
    _EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_QKV, _FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
#: Names of a layer's tensors, and Hugging Face's names of their parts.
_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    _QKV: ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    _FC1: ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
#: Names in checkpoints of modules that don't fuse a norm with the matrix that follows it.
_UNFUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
#: Modules of Megatron's layers that have a state without values, for Transformer Engine.
_EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
#: Megatron-core's constants (``models/common/embeddings/rotary_pos_embedding.py``).
_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FAMILIES = ("llama", "qwen3")
_ONLY = "only dense Llama and Qwen 3 models can be exchanged with Megatron"
_COPY = "copy the whole checkpoint again"
_SETTINGS = "run_config.yaml"
_MAX_SETTINGS_BYTES = 16 << 20
#: By a model's last name of its embedding, which trainer's names a checkpoint has.
_MEGATRON, _TITAN, _HUGGING_FACE = _EMBEDDING, "tok_embeddings.weight", "model.embed_tokens.weight"


def find(source: Path) -> Path | None:
    """Return the folder of a DCP checkpoint: the source, or its newest step (``iter_0000100``, ``step-100``)."""
    if (source / dcp.METADATA).is_file():
        return source
    found = [path.parent for path in source.glob(f"*/{dcp.METADATA}")]
    return max(found, key=lambda path: (_number(path.name), path.name), default=None)


def _number(name: str) -> float:
    match = re.search(r"(\d+)$", name)
    return int(match.group(1)) if match else float("inf")  # Megatron's `release`


def read(folder: Path, described: Path | None) -> tuple[ModelConfig, Callable[[], Parts]]:
    """Return the model of a DCP checkpoint, and a function that opens its weights, by Hugging Face's names.

    Check the model's size before: opening takes time and memory for each tensor. No tensor is read yet.

    Args:
        folder: has ``.metadata``.
        described: a ``config.json`` of Hugging Face; None: Megatron's own settings describe the model.

    Raises:
        CheckpointError: the names of the tensors are unknown, the model isn't described or can't be converted; or, when
            the weights are opened, a tensor is missing, has another shape, or isn't the model's.
    """
    metadata = dcp.read_metadata(folder)
    reader = dcp.BlockReader(folder, metadata)
    names, prefix = _names_of(folder, reader.tensors)
    model = None
    if described is not None:
        model = model_config(_read_object(described), described)
    if names != _MEGATRON:
        if model is None:
            raise CheckpointError(
                f"{folder}: doesn't describe its model",
                hint="name the model's config.json: --config HF_FOLDER/config.json",
            )
        return model, partial(_titan if names == _TITAN else _by_name, folder, reader, prefix, model)
    theirs = _megatron_model(folder, metadata, reader.tensors[prefix + _EMBEDDING].shape[0])
    if model is None and theirs is None:
        raise CheckpointError(
            f"{folder}: doesn't describe its model: it has no {_SETTINGS} and no args of Megatron-LM",
            hint="name the model's config.json: --config HF_FOLDER/config.json",
        )
    if model is not None and theirs is not None:
        _check_equal(model, theirs, described, folder)
    model = model or theirs
    assert model is not None
    check_model(model)
    return model, partial(_megatron, folder, reader, prefix, model)


def _names_of(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return whose names a checkpoint has, as the name of the embedding, and their prefix. Optimizers' are longer."""
    for names in (_MEGATRON, _TITAN, _HUGGING_FACE):
        found = [name for name in tensors if name == names or name.endswith(f".{names}")]
        if found:
            return names, min(found, key=len).removesuffix(names)
    raise CheckpointError(
        f"{folder}: its names are not known: {', '.join(sorted(tensors)[:3]) or 'it has no tensors'}",
        hint="names of Megatron-core, torchtitan or Hugging Face can be imported",
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = files.read_json(path)
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"--config={path}: can't be read ({why(error)})", hint="name a config.json") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"--config={path}: is {type(value).__name__}, must be an object", hint="name a config.json"
        )
    return value


def check_model(model: ModelConfig) -> None:
    """Raise a CheckpointError if Megatron has no such model, or none that is converted here."""
    if model.module is not None:
        raise CheckpointError(f"model.module={model.module}: {_ONLY}", hint="export it to Hugging Face's format")
    for key in ("num_experts", "kv_lora_rank"):
        if getattr(model, key):
            raise CheckpointError(f"model.{key}={getattr(model, key)}: {_ONLY}", hint="use Hugging Face's format")
    family = family_of(model).model_type
    if family not in _FAMILIES:
        raise CheckpointError(
            f"model.norm_position={model.norm_position} with model.qk_norm={model.qk_norm} ({family}): {_ONLY}",
            hint="use Hugging Face's format",
        )
    scaling = {
        "low_freq_factor": model.rope_low_freq_factor,
        "high_freq_factor": model.rope_high_freq_factor,
        "original_max_position_embeddings": model.rope_original_seq_len,
    }
    if model.rope_scaling != "none" and (model.rope_scaling != "llama3" or scaling != _ROPE):
        raise CheckpointError(
            f"model.rope_scaling={model.rope_scaling} with {scaling}: Megatron-core has only llama3 with {_ROPE}",
            hint="use Hugging Face's format",
        )


class _Stored(NamedTuple):
    """A tensor of Megatron's layout.

    Args:
        layer: number of its layer; None for embedding, head and last norm.
        name: its name, within the layer if it is a layer's.
        parts: Hugging Face's names of its parts.
    """

    layer: int | None
    name: str
    parts: tuple[str, ...]


def _layout(model: ModelConfig, parts: Mapping[str, Tensor]) -> Iterator[_Stored]:
    """Yield the tensors of a model. ``parts`` has Hugging Face's tensors."""
    yield from (_Stored(None, name, (theirs,)) for name, theirs in _TOP.items() if theirs in parts)
    for number in range(model.num_layers):
        for name, theirs in _LAYER.items():
            full = tuple(f"model.layers.{number}.{part}" for part in theirs)
            if full[0] in parts:
                yield _Stored(number, name, full)


def _joined(name: str, parts: list[Tensor], model: ModelConfig) -> Tensor:
    return join_qkv(parts, model) if name == _QKV else torch.cat(parts)


def _split(name: str, tensor: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
    if name == _QKV:
        return split_qkv(tensor, model)
    return tensor.chunk(2) if name == _FC1 else (tensor,)


class _Place(NamedTuple):
    """Where a tensor of a layout is: its name in the checkpoint, and its number in a stack of layers."""

    tensor: _Stored
    name: str
    stacked: bool
    shape: tuple[int, ...]


def _megatron(folder: Path, reader: dcp.BlockReader, prefix: str, model: ModelConfig) -> Parts:
    expected = to_hugging_face(empty_weights(model), model)
    places: dict[str, tuple[_Place, Tensor]] = {}
    _refuse_experts(folder, prefix, reader.tensors)
    for tensor in _layout(model, expected):
        shape = tuple(_joined(tensor.name, [expected[part] for part in tensor.parts], model).shape)
        place = _place(folder, reader.tensors, prefix, tensor, shape, model)
        dtype = reader.tensors[place.name].dtype
        like = {part: torch.empty(expected[part].shape, dtype=dtype, device="meta") for part in tensor.parts}
        places |= {part: (place, like[part]) for part in tensor.parts}
    known = {place.name for place, _ in places.values()} | {prefix + _HEAD if model.tie_embeddings else ""}
    modules = tuple(f"{prefix}{module}." for module in ("embedding", "encoder", "decoder", "output_layer", "mtp"))
    unknown = sorted(name for name in reader.tensors if name.startswith(modules) and name not in known)
    if unknown := [name for name in unknown if "._extra_state" not in name]:
        others = f" and {len(unknown) - 1} others" if unknown[1:] else ""
        raise CheckpointError(
            f"{folder}: {unknown[0]}{others}: not in a {family_of(model).model_type}; {_ONLY}",
            hint="convert the model to Hugging Face's format with Megatron-Bridge, and import that",
        )

    def read_parts(place: _Place) -> dict[str, Tensor]:
        first, length = ((place.tensor.layer or 0,), (1,)) if place.stacked else ((), ())
        block = reader.read(place.name, (*first, *(0 for _ in place.shape)), (*length, *place.shape))
        split = _split(place.tensor.name, block.view(place.shape), model)
        return dict(zip(place.tensor.parts, split, strict=True))

    return Parts(places, read_parts)


def _refuse_experts(folder: Path, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    experts = sorted(name for name in tensors if name.startswith(f"{prefix}decoder.") and ".experts." in name)
    if experts:
        raise CheckpointError(
            f"{folder}: {experts[0]}: has experts; {_ONLY}",
            hint="convert the model to Hugging Face's format with Megatron-Bridge, and import that",
        )


def _place(
    folder: Path,
    tensors: Mapping[str, Tensor],
    prefix: str,
    tensor: _Stored,
    shape: tuple[int, ...],
    model: ModelConfig,
) -> _Place:
    candidates = [(tensor.name, False)]
    if tensor.layer is not None:
        named = (tensor.name, _UNFUSED.get(tensor.name, tensor.name))
        candidates = [
            *((f"decoder.layers.{name}", True) for name in named),
            *((f"decoder.layers.{tensor.layer}.{name}", False) for name in named),
        ]
    found = [(prefix + name, stacked) for name, stacked in candidates if prefix + name in tensors]
    if not found:
        raise CheckpointError(f"{folder}: {prefix}{candidates[0][0]} is missing", hint=_COPY)
    name, stacked = found[0]
    stored, wanted = tuple(tensors[name].shape), (model.num_layers, *shape) if stacked else shape
    if tensor.name in (_EMBEDDING, _HEAD) and len(stored) == 2 and stored[0] >= shape[0]:
        wanted = (stored[0], *shape[1:])
    if stored != wanted:
        raise CheckpointError(
            f"{folder}: {name} has shape {stored}, expected {wanted}", hint="--config must be of this model"
        )
    return _Place(tensor, name, stacked, shape)


def _by_name(folder: Path, reader: dcp.BlockReader, prefix: str, model: ModelConfig) -> Parts:
    ours = tuple(prefix + each for each in ("model.", "lm_head."))
    stored = {name.removeprefix(prefix): tensor for name, tensor in reader.tensors.items() if name.startswith(ours)}

    def read_whole(name: str) -> dict[str, Tensor]:
        shape = tuple(stored[name].shape)
        return {name: reader.read(prefix + name, (0,) * len(shape), shape)}

    return Parts({name: (name, tensor) for name, tensor in stored.items()}, read_whole)


def _titan(folder: Path, reader: dcp.BlockReader, prefix: str, model: ModelConfig) -> Parts:
    from trainer.convert.torchtitan import TitanWeights  # takes seconds
    from trainer.torchtitan.models import model_spec

    return Parts.of(TitanWeights(folder, model_spec(Config(model=model)), prefix))


def _megatron_model(folder: Path, metadata: Metadata, rows: int) -> ModelConfig | None:
    """Return the model that a checkpoint's settings describe; None without settings. ``rows`` are of the embedding."""
    values, file = _settings(folder, metadata)
    if values is None:
        return None
    _check_settings(values, file)
    vocab_size = _first(values, "vocab_size")
    described = {
        "model_type": "qwen3" if _first(values, "qk_layernorm") else "llama",
        "vocab_size": vocab_size if isinstance(vocab_size, int) and 0 < vocab_size <= rows else rows,
        "hidden_size": values.get("hidden_size"),
        "intermediate_size": values.get("ffn_hidden_size"),
        "num_hidden_layers": values.get("num_layers"),
        "num_attention_heads": values.get("num_attention_heads"),
        "head_dim": values.get("kv_channels"),
        "rms_norm_eps": _first(values, "layernorm_epsilon", "norm_epsilon"),
        "rope_theta": values.get("rotary_base"),
    }
    if missing := [key for key, value in described.items() if value is None and key != "head_dim"]:
        raise CheckpointError(f"{file}: lacks {', '.join(missing)}", hint="name the model's config.json with --config")
    if values.get("group_query_attention", True):
        described["num_key_value_heads"] = values.get("num_query_groups")
    hidden, heads = described["hidden_size"], described["num_attention_heads"]
    if described["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        described["head_dim"] = hidden // heads
    untied = values.get("untie_embeddings_and_output_weights")
    described["tie_word_embeddings"] = (
        values.get("share_embeddings_and_output_weights") if untied is None else not untied
    )
    if _first(values, "rope_scaling", "use_rope_scaling"):
        described["rope_scaling"] = {"rope_type": "llama3", "factor": values.get("rope_scaling_factor"), **_ROPE}
    return replace(model_config(described, file), name=folder.name)


def _settings(folder: Path, metadata: Metadata) -> tuple[dict[str, Any] | None, Path]:
    """Return the model's settings and their file, without running code of the checkpoint."""
    file = folder / _SETTINGS
    if file.is_file():
        try:
            root = parse_yaml(read_bytes(file, _MAX_SETTINGS_BYTES).decode())
        except (OSError, *DAMAGED) as error:
            raise CheckpointError(f"{file}: can't be read ({why(error)})", hint=_COPY) from None
        model = root.get("model") if isinstance(root, dict) else None
        if not isinstance(model, dict):
            return None, file
        inner = model.get("transformer")  # of a GPTModelConfig
        return ({**inner, **model} if isinstance(inner, dict) else model), file
    for entry, file in (("common.pt", folder / "common.pt"), (("common_state/shard_0_1", metadata), folder)):
        try:
            state = dcp.read_objects(folder, entry)
        except FileNotFoundError:
            continue
        state = state[0] if isinstance(state, list) and state else state
        arguments = dcp.attributes(state.get("args")) if isinstance(state, dict) else {}
        return {name: _plain(value) for name, value in arguments.items()} or None, file
    return None, folder


#: Settings, by any of their names, with the values that models here have; None and absent mean the first one.
_REQUIRED: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...] = (
    (("num_experts", "num_moe_experts"), (None,)),
    (("multi_latent_attention",), (False,)),
    (("mtp_num_layers",), (None, 0)),
    (("normalization",), ("RMSNorm",)),
    (("swiglu", "gated_linear_unit"), (True,)),
    (("add_bias_linear",), (False,)),
    (("add_qkv_bias",), (False,)),
    (("layernorm_zero_centered_gamma", "apply_layernorm_1p"), (False,)),
    (("position_embedding_type",), ("rope",)),
    (("rotary_interleaved",), (False,)),
    (("rotary_percent",), (1.0,)),
    (("seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor"), (None, 1)),
    (("window_size",), (None,)),
    (("softmax_type",), ("vanilla",)),
    (("softmax_scale",), (None,)),
    (("qk_l2_norm",), (False,)),
    (("attention_output_gate",), (False,)),
    (("no_rope_freq",), (None,)),
)


def _check_settings(values: Mapping[str, Any], file: Path) -> None:
    for names, allowed in _REQUIRED:
        name = next((each for each in names if values.get(each) is not None), names[0])
        value = values.get(name)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{file}: {name}={value!s:.60}: must be {allowed[0]}; {_ONLY}",
                hint="convert the model to Hugging Face's format with Megatron-Bridge, and import that",
            )
    activation = values.get("activation_func")
    if activation is not None and "silu" not in str(activation):
        raise CheckpointError(f"{file}: activation_func={activation!s:.60}: must be silu", hint=_ONLY)


def _plain(value: Any) -> Any:
    """Return a value of a pickle, or its type: it may be nested endlessly, or have too many digits to be written."""
    is_plain = value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 1 << 64)
    return value if is_plain else f"({type(value).__name__})"


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _check_equal(ours: ModelConfig, theirs: ModelConfig, described: Path | None, folder: Path) -> None:
    """Refuse a config.json of another model. It may have fewer rows of the vocabulary."""
    free = ("name", "initializer_range", "scaled_initialization", "mup_base_width", "vocab_size")
    other = asdict(theirs)
    differing = [
        f"{key}={value} ({folder.name}: {other[key]})"
        for key, value in asdict(ours).items()
        if key not in free and value != other[key]
    ]
    if differing:
        raise CheckpointError(
            f"--config={described}: is of a different model: {', '.join(differing)}",
            hint="omit --config; the checkpoint describes its model",
        )


def write(weights: Weights, target: Path, *, config: Config, dtype: str, step: int, tokenizer: tuple[str, Path]) -> int:
    """Write weights as a release of Megatron's, for ``--load``, into a folder that exists; return their bytes.

    Reads and writes one tensor at a time.

    Args:
        weights: see :meth:`Weights.open`.
        target: an empty folder.
        config: the run's.
        dtype: torch's name, such as ``float32``.
        step: step of the checkpoint.
        tokenizer: its folder, and where ``target`` will be.

    Raises a CheckpointError if Megatron has no such model, or a tensor can't be read.
    """
    model, parts = config.model, Parts.of(weights)
    check_model(model)
    number_format: torch.dtype = getattr(torch, dtype)
    blocks = [_block(tensor, parts, model, number_format) for tensor in _layout(model, parts.tensors)]
    folder = target / "release"
    folder.mkdir()
    layers = range(model.num_layers)
    extra = {
        f"decoder.layers.{module}._extra_state/shard_{number}_{model.num_layers}": [None]
        for module in _EXTRA_STATES
        for number in layers
    }
    dcp.save_blocks(blocks, dict(extra), folder)
    source, final = tokenizer
    shutil.copytree(source, folder / "tokenizer")
    arguments = _arguments(config, tokenizer=final / "release" / "tokenizer")
    state = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": step}
    torch.save(state, folder / "common.pt")
    files.write_json(folder / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                                                "common_backend": "torch", "common_backend_version": 1})  # fmt: skip
    files.write_text(target / "latest_checkpointed_iteration.txt", "release")
    return sum(tensor.numel() * number_format.itemsize for tensor in parts.tensors.values())


def _block(tensor: _Stored, parts: Parts, model: ModelConfig, dtype: torch.dtype) -> dcp.Block:
    shape = tuple(_joined(tensor.name, [parts.tensors[part] for part in tensor.parts], model).shape)

    def values() -> Tensor:
        joined = _joined(tensor.name, [parts.read(part) for part in tensor.parts], model).to(dtype)
        return joined if tensor.layer is None else joined.unsqueeze(0)

    if tensor.layer is None:
        return dcp.Block(tensor.name, torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape, values)
    whole = torch.empty((model.num_layers, *shape), dtype=dtype, device="meta")
    return dcp.Block(f"decoder.layers.{tensor.name}", whole, (tensor.layer, *(0 for _ in shape)), (1, *shape), values)


def _arguments(config: Config, *, tokenizer: Path) -> dict[str, Any]:
    """Return what ``--use-checkpoint-args`` of Megatron-LM reads, and what readers of weights require."""
    model, theta = config.model, config.model.rope_theta
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "group_query_attention": True,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_width,
        "qk_layernorm": model.qk_norm == "head",
        "normalization": "RMSNorm",
        "norm_epsilon": model.rms_norm_eps,
        "layernorm_epsilon": model.rms_norm_eps,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": True,
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": model.rope_scaling == "llama3",
        "rope_scaling_factor": model.rope_scaling_factor,
        "seq_length": config.train.seq_len,
        "max_position_embeddings": config.train.seq_len,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "num_experts": None,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(tokenizer),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }
