"""Reads configurations of other projects and returns our keys: torchtitan's TOML and Python, and OLMo-core's JSON.

Nothing is executed: Python is parsed, and only its literals are read. What has no key here is listed, never guessed.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.load import dotted_keys
from hlatctl.run.errors import ConfigError
from hlatctl.run.files import read_bytes, why

_FORMS = "name a .toml file or config_registry.py of torchtitan, or a config.json of OLMo-core or Hugging Face"
#: No configuration that a person wrote or a program saved is larger.
_MOST_BYTES = 1 << 20


@dataclass(kw_only=True)
class Imported:
    """What a file said.

    Args:
        kind: the project that wrote it.
        keys: our keys with their values.
        dropped: their keys that were not carried over, as ``key=value``.
    """

    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def read(path: Path, name: str | None = None) -> Imported | None:
    """Return what a file says; None for Hugging Face's ``config.json``, which the trainer reads.

    Args:
        name: the function of torchtitan's ``config_registry.py`` to read, such as ``llama3_8b``.

    Raises:
        ConfigError: it can't be read, or has an unknown form.
    """
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8")
        if path.suffix == ".py":
            return _torchtitan(_of_python(path, text, name))
        described = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        if isinstance(described, dict) and path.suffix == ".toml":
            return _torchtitan(described)
        if isinstance(described, dict) and "model_type" in described:
            return None
        if isinstance(described, dict) and isinstance(described.get("model"), dict) and "d_model" in described["model"]:
            return _olmo_core(described)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last: nested too deep
        text = why(error) or "it is nested too deep"
        raise ConfigError(f"{path}: can't be read ({text})", hint=_FORMS) from None
    raise ConfigError(f"{path}: is no configuration of torchtitan, OLMo-core or Hugging Face", hint=_FORMS)


Convert = Callable[[Any], dict[str, Any] | None]


def _as(key: str) -> Convert:
    return lambda value: {key: value}


def _enabled(name: str, value: Any) -> Convert:
    return lambda given: {name: value} if given else {}


def _steps(value: Any) -> dict[str, Any]:
    return {"train.max_steps": value, "train.tokens": 10**15}  # the steps end the run


#: torchtitan's keys to ours (its releases 0.2 in TOML and 0.3 in Python). None from a conversion: not carried over.
_TORCHTITAN: dict[str, Convert] = {
    "model.name": _as("model.module"),
    "model.flavor": _as("model.flavor"),
    "optimizer.lr": _as("optimizer.lr"),
    "optimizer.eps": _as("optimizer.eps"),
    "optimizer.beta1": _as("optimizer.beta1"),
    "optimizer.beta2": _as("optimizer.beta2"),
    "optimizer.weight_decay": _as("optimizer.weight_decay"),
    "optimizer.name": lambda value: {"optimizer": "adamw"} if value == "AdamW" else None,
    "lr_scheduler.warmup_steps": _as("optimizer.warmup_steps"),
    "lr_scheduler.decay_type": lambda value: {"optimizer.schedule": value} if value in ("linear", "cosine") else None,
    "lr_scheduler.min_lr_factor": _as("optimizer.min_lr_fraction"),
    "training.local_batch_size": _as("train.micro_batch_size"),
    "training.global_batch_size": lambda value: {"train.global_batch_size": value} if value > 0 else None,
    "training.seq_len": _as("train.seq_len"),
    "training.max_norm": _as("optimizer.max_grad_norm"),
    "training.steps": _steps,
    "training.seed": _as("seed"),
    "parallelism.tensor_parallel_degree": _as("parallel.tensor_parallel_size"),
    "parallelism.pipeline_parallel_degree": _as("parallel.pipeline_parallel_size"),
    "parallelism.context_parallel_degree": _as("parallel.context_parallel_size"),
    "parallelism.expert_parallel_degree": _as("parallel.expert_parallel_size"),
    "parallelism.data_parallel_shard_degree": lambda value: {"parallel.data_parallel": "fsdp"} if value == -1 else None,
    "parallelism.data_parallel_replicate_degree": lambda value: {} if value == 1 else None,
    "checkpoint.interval": _as("checkpoint.every_steps"),
    "checkpoint.keep_latest_k": lambda value: {"checkpoint.keep": value} if value > 0 else None,
    "compile.enable": _as("backend.compile"),
    "activation_checkpoint.mode": lambda value: (
        {"parallel.activation_checkpointing": value} if value in ("none", "selective", "full") else None
    ),
}


#: What a file that names no schedule means (torchtitan 0.3.0, ``LRSchedulersContainer.Config``).
_TORCHTITAN_USUAL = {"optimizer.warmup_steps": 200, "optimizer.schedule": "linear", "optimizer.min_lr_fraction": 0.0}


def _torchtitan(described: dict[str, Any]) -> Imported:
    usual = {"backend": "torchtitan", "backend.device": "cuda", **_TORCHTITAN_USUAL}
    found = Imported(kind="torchtitan", keys=usual)
    _carry(found, dotted_keys(described), _TORCHTITAN)
    if "model.module" in found.keys:
        found.keys = {"model": "torchtitan", **found.keys}
    if "train.global_batch_size" not in found.keys:
        found.dropped.append("training.global_batch_size=local_batch_size of each replica: set train.global_batch_size")
    return found


def _of_python(path: Path, text: str, name: str | None) -> dict[str, Any]:
    """Return the literals of a function of ``config_registry.py``, as its TOML would have them."""
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ConfigError(
            f"{path}: {f'has no function {name}' if name else 'has several configurations'}",
            hint=f"--name can be {', '.join(functions)}" if functions else "name torchtitan's config_registry.py",
        )
    described: dict[str, Any] = {"model": {"name": path.parent.name}}
    for node in ast.walk(functions[name]):
        if isinstance(node, ast.Call) and _called(node) == "model_registry" and node.args:
            described["model"]["flavor"] = _literal(node.args[0])
        if not (isinstance(node, ast.keyword) and node.arg and isinstance(node.value, ast.Call)):
            continue
        section = described.setdefault(node.arg, {})
        section |= {each.arg: _literal(each.value) for each in node.value.keywords if each.arg}
        if node.arg == "activation_checkpoint":
            section["mode"] = {"SelectiveAC": "selective", "FullAC": "full"}.get(_called(node.value), "?")
    return {section: values for section, values in described.items() if values}


def _called(node: ast.Call) -> str:
    """Return the name of what is called: ``f`` of ``f()``, and ``C`` of ``C.Config()``."""
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id
    return function.id if isinstance(function, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # such as a list as a key
        return _Code(ast.unparse(node))


class _Code(str):
    """Source that is not a literal, so it is not carried over."""


_OLMO_CORE: dict[str, Convert] = {
    "model.d_model": _as("model.hidden_size"),
    "model.vocab_size": _as("model.vocab_size"),
    "model.n_layers": _as("model.num_layers"),
    "model.init_std": _as("model.initializer_range"),
    "model.tie_word_embeddings": _as("model.tie_embeddings"),
    "model.block.attention.n_heads": _as("model.num_heads"),
    "model.block.attention.n_kv_heads": _as("model.num_kv_heads"),
    "model.block.attention.head_dim": _as("model.head_dim"),
    "model.block.attention.rope.theta": _as("model.rope_theta"),
    "model.block.attention.use_head_qk_norm": _enabled("model.qk_norm", "head"),
    "model.block.feed_forward.hidden_size": _as("model.intermediate_size"),
    "model.block.layer_norm.eps": _as("model.rms_norm_eps"),
    "model.block.name": lambda value: (
        {"model.norm_position": {"default": "pre", "reordered_norm": "post"}[value]}
        if value in ("default", "reordered_norm")
        else None
    ),
    "train_module.optim.lr": _as("optimizer.lr"),
    "train_module.optim.betas": lambda value: {"optimizer.beta1": value[0], "optimizer.beta2": value[1]},
    "train_module.optim.eps": _as("optimizer.eps"),
    "train_module.optim.weight_decay": _as("optimizer.weight_decay"),
    "train_module.max_grad_norm": _as("optimizer.max_grad_norm"),
    "train_module.z_loss_multiplier": _as("train.z_loss"),
    "train_module.compile_model": _as("backend.compile"),
    "train_module.scheduler.alpha_f": _as("optimizer.min_lr_fraction"),
    "train_module.scheduler.warmup_steps": _as("optimizer.warmup_steps"),
    "train_module.max_sequence_length": _as("train.seq_len"),
    "dataset.sequence_length": _as("train.seq_len"),
    "trainer.max_duration.value": lambda value: {"train.tokens": value},
    "trainer.callbacks.checkpointer.save_interval": _as("checkpoint.every_steps"),
    "init_seed": _as("seed"),
}
#: Set by OLMo-core itself, or without a meaning for a recipe.
_SILENT = ("_CLASS_", "dtype", "bias")


def _olmo_core(described: dict[str, Any]) -> Imported:
    found = Imported(kind="OLMo-core", keys={"model.scaled_initialization": False})
    block = described["model"].get("block")
    if isinstance(block, dict) and "sequence_mixer" in block:  # newer name
        block["attention"] = block.pop("sequence_mixer")
    flat = {key: value for key, value in dotted_keys(described).items() if key.split(".")[-1] not in _SILENT}
    unit = flat.pop("trainer.max_duration.unit", "tokens")
    table = dict(_OLMO_CORE)
    if unit == "steps":
        table["trainer.max_duration.value"] = _steps
    elif unit != "tokens":
        table["trainer.max_duration.value"] = lambda _: None
    if any(key.startswith("model.block.attention.qk_norm.") for key in flat):
        found.keys["model.qk_norm"] = "all"
        flat = {key: value for key, value in flat.items() if not key.startswith("model.block.attention.qk_norm.")}
    if "model.block.attention.n_kv_heads" not in flat and "model.block.attention.n_heads" in flat:
        flat["model.block.attention.n_kv_heads"] = flat["model.block.attention.n_heads"]
    _carry(found, flat, table)
    batch_tokens, seq_len = flat.get("data_loader.global_batch_size"), found.keys.get("train.seq_len")
    if isinstance(batch_tokens, int) and isinstance(seq_len, int) and seq_len > 0 and batch_tokens % seq_len == 0:
        found.keys["train.global_batch_size"] = batch_tokens // seq_len
        found.dropped = [line for line in found.dropped if not line.startswith("data_loader.global_batch_size=")]
    return found


def _carry(found: Imported, described: dict[str, Any], table: dict[str, Convert]) -> None:
    for key, value in described.items():
        if value is None:
            continue
        try:
            ours = table[key](value) if _is_plain(value) and key in table else None
        except (TypeError, IndexError, KeyError):
            ours = None
        if ours is None:
            found.dropped.append(f"{key}={value}"[:200])
        else:
            found.keys |= ours


def _is_plain(value: Any) -> bool:
    """Return whether a value can be one of ours: TOML has dates, and Python has bytes, sets and complex numbers."""
    each = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, str | int | float) and not isinstance(one, _Code) for one in each)
