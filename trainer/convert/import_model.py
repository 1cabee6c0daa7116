"""``python -m trainer.convert.import_model --from FOLDER --to DIR``: import a model as a checkpoint.

The folder is a Hugging Face model's, a checkpoint of Megatron-LM or Megatron-Bridge, or a DCP checkpoint with names of
torchtitan or Hugging Face; such a one needs ``--config``, a Hugging Face ``config.json``.

With ``--backend torchtitan``, and for models that only torchtitan trains, the checkpoint has torchtitan's format.

The checkpoint has weights (no moments), ``model.json``, ``tokenizer/`` if the model has one, ``state.json``, and
``manifest.json``, written last. ``train.init_from=DIR`` starts a run from it. No code of a file is run: see
``trainer.checkpoint.dcp`` for DCP's pickles; others are never opened. Prints a summary as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.initial_weights import MODEL
from conf.registries import BACKENDS
from conf.schema import ModelConfig
from conf.sizes import BF16_BYTES, parameters
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import CheckpointError, run_main
from hlatctl.run.files import check_size, new_folder, why
from hlatctl.units import size
from trainer.checkpoint.shards import DTYPES, WEIGHTS, grouped, save_groups
from trainer.convert.hugging_face import NAMED, Parts, empty_weights, joined, model_config, to_hugging_face

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
)
_COPY = "copy the whole folder again; its files must be of one model"
#: A file of the checkpoint holds at most this, unless a single tensor is larger.
_GROUP_BYTES = 5 << 30
#: Suffix of tables in older exports that are computed, not learned.
_COMPUTED = "rotary_emb.inv_freq"


def import_model(
    source: Path, target: Path, backend: str = "torch_native", described: Path | None = None
) -> dict[str, Any]:
    """Write the checkpoint atomically, in the format of a backend, or of torchtitan if only that can train the model.

    A checkpoint for torchtitan needs memory for its weights, others for a few gigabytes of them.

    Args:
        source: folder of a Hugging Face model, or of a DCP checkpoint of another trainer, or of its checkpoints.
        target: new folder.
        backend: ``backend.name``.
        described: ``config.json`` of a DCP checkpoint's model, with the tokenizer beside it.

    Returns:
        ``{"from", "to", "parameters", "dtypes", "model": {...}, "backend", "tokenizer": path or None}``.

    Raises:
        CheckpointError: the source isn't a supported model, or is damaged.
        StorageError: the target exists, or can't be written.
    """
    source, model, parts = _open(source, described)
    parts.tensors = {name: each for name, each in parts.tensors.items() if not name.endswith(_COMPUTED)}
    for name, tensor in parts.tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise CheckpointError(f"{source}: {name} is {tensor.dtype}: not supported", hint="save it as bfloat16")
    backend = "torchtitan" if model.module or model.num_experts or model.kv_lora_rank else backend
    with new_folder(target) as partial:
        if BACKENDS[backend].checkpoint_format == "dcp":
            from trainer.convert.torchtitan import save_titan  # takes seconds

            ours = save_titan({name: _trainable(parts.read(name)) for name in parts.tensors}, partial, model)
        else:
            _check_weights(source, parts.tensors, model)
            ours = _save(parts, partial, model)
        tokenizer = _copy_tokenizer(source, described, partial / "tokenizer")
        files.write_json(partial / MODEL, asdict(model))
        files.write_json(partial / "state.json", {"imported_from": os.fspath(source)})
        write_manifest(partial, step=0, tokens=0, world={})
    return {
        "from": os.fspath(source),
        "to": os.fspath(target),
        "parameters": sum(tensor.numel() for tensor in ours.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in ours.values()}),
        "model": asdict(model),
        "backend": backend,
        "tokenizer": os.fspath(target / tokenizer) if tokenizer else None,
    }


def _open(source: Path, described: Path | None) -> tuple[Path, ModelConfig, Parts]:
    """Return the folder of the weights, their model, and what reads them."""
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: no such folder", hint="name a folder of `save_pretrained`, or of a DCP checkpoint"
        )
    if not any((source / name).exists() for name in (_WEIGHTS, _INDEX)):
        from trainer.convert import megatron  # takes seconds

        if folder := megatron.find(source):
            model, open_weights = megatron.read(folder, described)
            _check_size(described or folder, sorted(folder.glob("*.distcp")), model)
            return folder, model, open_weights()
    if described is not None:
        raise CheckpointError(
            f"--config={described}: {source} is not a DCP checkpoint", hint="omit --config; its config.json is read"
        )
    model, paths = _read_model(source), _weight_files(source)
    _check_size(source / _CONFIG, paths, model)
    places: dict[str, tuple[tuple[Path, str], Tensor]] = {}
    for path in paths:
        with _opened(path) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                places[name] = ((path, name), _described(path, name, opened.get_slice(name)))
    return source, model, Parts(places, _read_safetensors)


def _described(path: Path, name: str, stored: Any) -> Tensor:
    if (dtype := DTYPES.get(stored.get_dtype())) is None:
        raise CheckpointError(f"{path}: {name} is {stored.get_dtype()}: not supported", hint="save it as bfloat16")
    return torch.empty(stored.get_shape(), dtype=dtype, device="meta")


def _read_safetensors(place: tuple[Path, str]) -> dict[str, Tensor]:
    path, name = place
    with _opened(path) as opened:
        return {name: opened.get_tensor(name)}


def _read_model(source: Path) -> ModelConfig:
    described = _read_object(source / _CONFIG)
    if described.get("model_type") in NAMED:
        from trainer.convert.torchtitan import named_model  # takes seconds

        return named_model(described, source / _CONFIG)
    return model_config(described, source / _CONFIG)


def _check_weights(source: Path, tensors: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Check names and shapes; tied embeddings may be stored twice."""
    expected = to_hugging_face(empty_weights(model), model)
    copies = {"lm_head.weight"} if model.tie_embeddings else set()
    if unknown := sorted(set(tensors) - set(expected) - copies):
        raise CheckpointError(
            f"{source}: has weights that its {_CONFIG} doesn't describe: {_some(unknown)}", hint=_COPY
        )
    if missing := sorted(set(expected) - set(tensors)):
        raise CheckpointError(
            f"{source}: {len(missing)} of {len(expected)} weights are missing: {_some(missing)}", hint=_COPY
        )
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensors[name].shape)}, {_CONFIG} requires {tuple(tensor.shape)}",
                hint=_COPY,
            )


def _save(parts: Parts, folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Write the weights in the native format; return them by our names, without values."""
    written = {}

    def read(names: list[str]) -> dict[str, Tensor]:
        group = {name: joined(name, lambda theirs: _trainable(parts.read(theirs)), model) for name in names}
        written.update({name: tensor.to("meta") for name, tensor in group.items()})
        return {WEIGHTS + name: tensor for name, tensor in group.items()}

    sizes = {name: tensor.nbytes for name, tensor in empty_weights(model).items()}
    save_groups(map(read, grouped(sizes, _GROUP_BYTES)), folder)
    return written


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error})", hint="copy it again") from None


def _trainable(tensor: Tensor) -> Tensor:
    """Return a weight as FP32 or BF16. BF16 can't represent all FP16 values; FP32 can."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def _check_size(described: Path, paths: list[Path], model: ModelConfig) -> None:
    """Refuse a description of more parameters than the files can have, before allocating anything of that size."""
    parameter_count, stored_bytes = parameters(model).total, sum(path.stat().st_size for path in paths)
    needed_bytes = parameter_count * BF16_BYTES  # no supported format is smaller
    if needed_bytes > stored_bytes:
        raise CheckpointError(
            f"{described}: describes {parameter_count} parameters, which need at least {size(needed_bytes)}, "
            f"but the weights' files have {size(stored_bytes)}",
            hint=_COPY,
        )


def _weight_files(source: Path) -> list[Path]:
    """Return a folder's safetensors files, from the index if there is one."""
    if (source / _INDEX).is_file():
        named = _read_object(source / _INDEX).get("weight_map")
        names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
        outside = [name for name in names if Path(name).name != name]
        if outside or not names:
            raise CheckpointError(
                f"{source / _INDEX}: weight_map must name files of the folder, not {_some(outside) or 'nothing'}",
                hint=_COPY,
            )
        gone = [name for name in names if not (source / name).is_file()]
        if gone:
            raise CheckpointError(f"{source / _INDEX}: files are missing: {_some(gone)}", hint=_COPY)
        return [source / name for name in names]
    if (source / _WEIGHTS).is_file():
        return [source / _WEIGHTS]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in source.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{source}: has only pickled weights ({_some(pickles)}); pickles can run code and are never loaded",
            hint="if you trust it, load it with transformers and run `save_pretrained(DIR, safe_serialization=True)`",
        )
    raise CheckpointError(f"{source}: has neither {_WEIGHTS} nor {_INDEX}", hint="import a folder of `save_pretrained`")


def _copy_tokenizer(source: Path, described: Path | None, folder: Path) -> str | None:
    """Copy the tokenizer's files and return ``tokenizer.path`` relative to the checkpoint; None without a tokenizer.

    Megatron-Bridge has them in a folder ``tokenizer``.
    """
    candidates = [*([described.parent] if described else []), source, source / "tokenizer"]
    kinds = ("tokenizer.json", "tokenizer.model")
    found = next((each for each in candidates if any((each / name).is_file() for name in kinds)), None)
    if found is None:
        return None
    source, names = found, [name for name in _TOKENIZER_FILES if (found / name).is_file()]
    folder.mkdir()
    for name in names:
        try:
            check_size(source / name)
        except OSError as error:
            raise CheckpointError(f"{source / name}: can't be used ({why(error)})", hint=_COPY) from None
        shutil.copyfile(source / name, folder / name)
    return folder.name if "tokenizer.json" in names else f"{folder.name}/tokenizer.model"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file", hint="name a folder that `save_pretrained` wrote") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({why(error)})", hint=_COPY) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is {type(value).__name__}, must be an object", hint=_COPY)
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def main(argv: list[str] | None = None) -> int:
    """Import a model; return the exit code."""
    parser = argparse.ArgumentParser(prog="trainer.convert.import_model", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="the model's folder")
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    parser.add_argument("--backend", default="torch_native", help="backend that trains it; default: %(default)s")
    parser.add_argument("--config", type=Path, help="config.json of a DCP checkpoint's model")
    arguments = parser.parse_args(argv)
    described = arguments.config and arguments.config.absolute()
    source, target = arguments.source.absolute(), arguments.to.absolute()
    print(json.dumps(import_model(source, target, arguments.backend, described)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
