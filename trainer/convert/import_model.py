"""``python -m trainer.convert.import_model --from HF_FOLDER --to DIR``: a Hugging Face LLaMA as a checkpoint.

The folder has the weights as every checkpoint has them (no moments), ``model.json``, ``tokenizer/`` if the model came
with one, ``state.json`` and ``manifest.json`` last: ``train.init_from=DIR`` begins a run with it. Weights are read from
safetensors alone; a pickle is never opened. Prints a line of JSON that says what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.initial_weights import MODEL
from hlatctl.run import files
from hlatctl.run.atomic import new_folder
from hlatctl.run.errors import CheckpointError, run_main
from hlatctl.run.manifest import write_manifest
from trainer.convert.hugging_face import from_hugging_face, model_config, to_hugging_face
from trainer.storage import save_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from conf.schema import ModelConfig

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
)
#: Of older exports: tables that are computed, not learned.
_COMPUTED = "rotary_emb.inv_freq"


def import_model(source: Path, target: Path) -> dict[str, Any]:
    """Write the folder, whole or not at all.

    Returns:
        ``{"to", "parameters", "dtypes", "model": {...}, "tokenizer": path or None}``.

    Raises:
        CheckpointError: the source is not a LLaMA that our model can be, or is damaged.
        StorageError: the target exists, or can't be written.
    """
    model = _read_model(source)
    with new_folder(target) as partial:
        weights = _read_weights(source, model)
        ours = {f"model.{name}": tensor for name, tensor in from_hugging_face(weights, model).items()}
        save_tensors(ours, partial, alone=True)
        tokenizer = _copy_tokenizer(source, partial / "tokenizer")
        files.write_json(partial / MODEL, asdict(model))
        files.write_json(partial / "state.json", {"imported_from": os.fspath(source)})
        write_manifest(partial, step=0, tokens=0, world={})
    return {
        "to": os.fspath(target),
        "parameters": sum(tensor.numel() for tensor in ours.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in ours.values()}),
        "model": asdict(model),
        "tokenizer": os.fspath(target / tokenizer) if tokenizer else None,
    }


def _read_model(source: Path) -> ModelConfig:
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder", hint="name a folder that `save_pretrained` wrote")
    described = _read_object(source / _CONFIG)
    return model_config(described, source / _CONFIG)


def _read_weights(source: Path, model: ModelConfig) -> dict[str, Tensor]:
    """All weights by their names, FP32 or BF16, each of the shape that the model asks for."""
    import torch
    from safetensors import SafetensorError, safe_open

    expected = _expected(model)
    weights: dict[str, Tensor] = {}
    for path in _weight_files(source):
        try:
            with safe_open(path, framework="pt") as opened:
                names = set(opened.keys())
                _refuse_unknown(path, names - set(expected), model)
                weights.update({name: opened.get_tensor(name) for name in names & set(expected)})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})", hint="copy it again") from None
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise CheckpointError(f"{source}: {len(missing)} of {len(expected)} weights are missing: {_some(missing)}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, {_CONFIG} asks for {tuple(expected[name].shape)}"
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise CheckpointError(f"{source}: {name} is {tensor.dtype}: not supported", hint="save it as bfloat16")
    # FP16 has values that BF16 has not; FP32 has them all.
    return {name: tensor if tensor.dtype == torch.bfloat16 else tensor.float() for name, tensor in weights.items()}


def _expected(model: ModelConfig) -> dict[str, Tensor]:
    """The weights that a model of that shape has, by their names, without memory."""
    import torch

    from trainer.model import Llama

    with torch.device("meta"):
        ours = dict(Llama(model, 2).named_parameters())
        return to_hugging_face({name: parameter.detach() for name, parameter in ours.items()}, model)


def _weight_files(source: Path) -> list[Path]:
    """The safetensors files of a folder, by the index if there is one."""
    if (source / _INDEX).is_file():
        named = _read_object(source / _INDEX).get("weight_map")
        names = sorted(set(named.values())) if isinstance(named, dict) else []
        outside = [name for name in names if Path(name).name != name]
        if outside or not names:
            raise CheckpointError(f"{source / _INDEX}: weight_map must name files of the folder, not {_some(outside)}")
        gone = [name for name in names if not (source / name).is_file()]
        if gone:
            raise CheckpointError(f"{source / _INDEX}: files are missing: {_some(gone)}", hint="copy the folder again")
        return [source / name for name in names]
    if (source / _WEIGHTS).is_file():
        return [source / _WEIGHTS]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in source.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{source}: holds pickled weights only ({_some(pickles)}); a pickle can run code and is never loaded",
            hint="where you trust it, load it with transformers and `save_pretrained(DIR, safe_serialization=True)`",
        )
    raise CheckpointError(f"{source}: has neither {_WEIGHTS} nor {_INDEX}", hint="import a folder of `save_pretrained`")


def _refuse_unknown(path: Path, names: Iterable[str], model: ModelConfig) -> None:
    """A weight that our model has no place for would be lost; tied embeddings may be written twice."""
    copies = {"lm_head.weight"} if model.tie_embeddings else set()
    unknown = sorted(name for name in names if name not in copies and not name.endswith(_COMPUTED))
    if unknown:
        raise CheckpointError(f"{path}: has weights that a LLaMA of its {_CONFIG} has not: {_some(unknown)}")


def _copy_tokenizer(source: Path, folder: Path) -> str | None:
    """Copy the tokenizer's files; what ``tokenizer.path`` should name, relative to the checkpoint."""
    found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model"} & set(found):
        return None
    folder.mkdir()
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return folder.name if "tokenizer.json" in found else f"{folder.name}/tokenizer.model"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file", hint="name a folder that `save_pretrained` wrote") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def main(argv: list[str] | None = None) -> int:
    """Import; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.convert.import_model", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--to", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args(argv)
    print(json.dumps(import_model(arguments.source.absolute(), arguments.to.absolute())))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
