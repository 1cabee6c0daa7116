"""``python -m trainer.convert.import_model --from HF_FOLDER --to DIR``: import a Hugging Face model as a checkpoint.

With ``--backend torchtitan``, and for models that only torchtitan trains, the checkpoint has torchtitan's format.

The checkpoint has weights (no moments), ``model.json``, ``tokenizer/`` if the model has one, ``state.json``, and
``manifest.json``, written last. ``train.init_from=DIR`` starts a run from it. Reads weights only from safetensors and
never opens a pickle. Prints a summary as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
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
from trainer.checkpoint.shards import save_whole
from trainer.convert.hugging_face import NAMED, from_hugging_face, model_config, to_hugging_face
from trainer.model.decoder import Llama

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
)
_COPY = "copy the whole folder again; its files must be of one model"
#: Suffix of tables in older exports that are computed, not learned.
_COMPUTED = "rotary_emb.inv_freq"


def import_model(source: Path, target: Path, backend: str = "torch_native") -> dict[str, Any]:
    """Write the checkpoint atomically, in the format of a backend, or of torchtitan if only that can train the model.

    Returns:
        ``{"to", "parameters", "dtypes", "model": {...}, "backend", "tokenizer": path or None}``.

    Raises:
        CheckpointError: the source isn't a supported model, or is damaged.
        StorageError: the target exists, or can't be written.
    """
    model = _read_model(source)
    backend = "torchtitan" if model.module or model.num_experts or model.kv_lora_rank else backend
    with new_folder(target) as partial:
        if BACKENDS[backend].checkpoint_format == "dcp":
            from trainer.convert.torchtitan import save_titan  # takes seconds

            ours = save_titan(_read_titan(source, model), partial, model)
        else:
            weights = _read_weights(source, model)
            ours = {f"model.{name}": tensor for name, tensor in from_hugging_face(weights, model).items()}
            save_whole(ours, partial)
        tokenizer = _copy_tokenizer(source, partial / "tokenizer")
        files.write_json(partial / MODEL, asdict(model))
        files.write_json(partial / "state.json", {"imported_from": os.fspath(source)})
        write_manifest(partial, step=0, tokens=0, world={})
    return {
        "to": os.fspath(target),
        "parameters": sum(tensor.numel() for tensor in ours.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in ours.values()}),
        "model": asdict(model),
        "backend": backend,
        "tokenizer": os.fspath(target / tokenizer) if tokenizer else None,
    }


def _read_model(source: Path) -> ModelConfig:
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder", hint="name a folder that `save_pretrained` wrote")
    described = _read_object(source / _CONFIG)
    if described.get("model_type") in NAMED:
        from trainer.convert.torchtitan import named_model  # takes seconds

        return named_model(described, source / _CONFIG)
    return model_config(described, source / _CONFIG)


def _read_weights(source: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Return all weights by their names, as FP32 or BF16, after checking names and shapes."""
    paths = _weight_files(source)
    _check_size(source, paths, model)
    expected = _expected(model)
    weights: dict[str, Tensor] = {}
    for path in paths:
        with _opened(path) as opened:
            names = set(opened.keys())
            _refuse_unknown(path, names - set(expected), model)
            weights.update({name: opened.get_tensor(name) for name in names & set(expected)})
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise CheckpointError(
            f"{source}: {len(missing)} of {len(expected)} weights are missing: {_some(missing)}", hint=_COPY
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, {_CONFIG} requires {tuple(expected[name].shape)}",
                hint=_COPY,
            )
    return {name: _trainable(source, name, tensor) for name, tensor in weights.items()}


def _read_titan(source: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Return all weights by their names; torchtitan's adapter checks names and shapes."""
    paths = _weight_files(source)
    _check_size(source, paths, model)
    weights: dict[str, Tensor] = {}
    for path in paths:
        with _opened(path) as opened:
            names = [name for name in opened.keys() if not name.endswith(_COMPUTED)]  # noqa: SIM118 (not a dictionary)
            weights.update({name: _trainable(source, name, opened.get_tensor(name)) for name in names})
    return weights


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error})", hint="copy it again") from None


def _trainable(source: Path, name: str, tensor: Tensor) -> Tensor:
    """Return a weight as FP32 or BF16. BF16 can't represent all FP16 values; FP32 can."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(f"{source}: {name} is {tensor.dtype}: not supported", hint="save it as bfloat16")
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def _check_size(source: Path, paths: list[Path], model: ModelConfig) -> None:
    """Refuse a description of more parameters than the files can have, before allocating anything of that size."""
    described, stored_bytes = parameters(model).total, sum(path.stat().st_size for path in paths)
    needed_bytes = described * BF16_BYTES  # no supported format is smaller
    if needed_bytes > stored_bytes:
        raise CheckpointError(
            f"{source / _CONFIG}: describes {described} parameters, which need at least {size(needed_bytes)}, "
            f"but the weights' files have {size(stored_bytes)}",
            hint=_COPY,
        )


def _expected(model: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        ours = dict(Llama(model, 2).named_parameters())
        return to_hugging_face({name: parameter.detach() for name, parameter in ours.items()}, model)


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


def _refuse_unknown(path: Path, names: Iterable[str], model: ModelConfig) -> None:
    """Refuse weights that our model doesn't have; tied embeddings may be stored twice."""
    copies = {"lm_head.weight"} if model.tie_embeddings else set()
    unknown = sorted(name for name in names if name not in copies and not name.endswith(_COMPUTED))
    if unknown:
        raise CheckpointError(f"{path}: has weights that its {_CONFIG} doesn't describe: {_some(unknown)}", hint=_COPY)


def _copy_tokenizer(source: Path, folder: Path) -> str | None:
    """Copy the tokenizer's files and return ``tokenizer.path`` relative to the checkpoint; None without a tokenizer."""
    names = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model"} & set(names):
        return None
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
    parser.add_argument("--from", dest="source", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    parser.add_argument("--backend", default="torch_native", help="backend that trains it; default: %(default)s")
    arguments = parser.parse_args(argv)
    print(json.dumps(import_model(arguments.source.absolute(), arguments.to.absolute(), arguments.backend)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
