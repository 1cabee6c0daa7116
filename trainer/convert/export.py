"""``python -m trainer.convert.export --run-dir RUN [--step N] --to DIR``: a checkpoint as a Hugging Face LLaMA folder.

Only the weights are read, some gigabytes at a time. The coalesced layers are cut apart again; nothing else changes, so
logits are the same. Prints a line of JSON that says what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.load import load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.atomic import new_folder
from hlatctl.run.errors import CheckpointError, DataError, run_main
from hlatctl.run.manifest import folder_steps, read_manifest, why_invalid
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED, why
from trainer.convert.hugging_face import hugging_face_config, to_hugging_face
from trainer.storage import describe_tensors, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16")
_WEIGHTS = "model."
#: A file of the exported model holds at most this, unless a single tensor is larger.
_SHARD_BYTES = 5 << 30


def export(config: Config, run: RunPaths, step: int | None, target: Path, dtype: str | None = None) -> dict[str, Any]:
    """Write the folder, whole or not at all.

    Args:
        config: of the run.
        run: its directory.
        step: of the checkpoint; none: the newest valid one.
        target: folder to make.
        dtype: of the weights, one of :data:`DTYPES`; none: as the checkpoint has them.

    Returns:
        ``{"step", "tokens", "to", "parameters", "dtype", "bytes"}``.

    Raises:
        CheckpointError: there is no valid checkpoint of that step, or it holds no weights.
        DataError: the run's tokenizer is gone.
        StorageError: the folder exists, or can't be written.
    """
    tokenizer = _tokenizer(run)
    with new_folder(target) as partial:
        folder = choose(run, step)
        weights = _describe(folder)
        stored = next(iter(weights.values())).dtype
        named = dtype or str(stored).removeprefix("torch.")
        shutil.copytree(tokenizer["path"], partial, dirs_exist_ok=True)
        size = _write_weights(folder, weights, config, partial, named)
        described = hugging_face_config(
            config.model,
            seq_len=config.train.seq_len,
            bos_id=tokenizer["bos_id"],
            eos_id=tokenizer["eos_id"],
            dtype=named,
        )
        files.write_json(partial / "config.json", described)
    manifest = read_manifest(folder)
    parameters = sum(tensor.numel() for tensor in weights.values())
    return {
        "step": manifest.step,
        "tokens": manifest.tokens,
        "to": os.fspath(target),
        "parameters": parameters,
        "dtype": named,
        "bytes": size,
    }


def choose(run: RunPaths, step: int | None) -> Path:
    """The folder of a step's checkpoint, or of the newest valid one; every file has been read and is as written.

    Raises:
        CheckpointError: there is none.
    """
    steps = folder_steps(run)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{run.checkpoint(step)}: no such checkpoint", hint=f"steps that have one: {there}")
    reasons = []
    for candidate in [step] if step is not None else reversed(steps):
        folder = run.checkpoint(candidate)
        reason = why_invalid(folder)
        if reason is None:
            return folder
        reasons.append(f"step {candidate}: {reason}")
    told = "; ".join(reasons) or "none was written"
    raise CheckpointError(f"{run.checkpoints}: no valid checkpoint ({told})", hint="`hlatctl checkpoint ls` lists them")


def read_weights(run: RunPaths, step: int) -> dict[str, Tensor]:
    """The weights of a checkpoint by our names, whole, whatever layout wrote them; moments stay on the disk."""
    tensors = read_tensors(choose(run, step), lambda name: name.startswith(_WEIGHTS))
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in tensors.items()}


def _describe(folder: Path) -> dict[str, Tensor]:
    weights = {name: tensor for name, tensor in describe_tensors(folder).items() if name.startswith(_WEIGHTS)}
    if not weights:
        raise CheckpointError(f"{folder}: holds no weights", hint="a simulated run (--dry-run) trains none")
    return weights


def _write_weights(folder: Path, weights: dict[str, Tensor], config: Config, target: Path, dtype: str) -> int:
    """Write the tensors in files of a bearable size, with an index if there are several; the bytes of all tensors."""
    import torch
    from safetensors.torch import save_file

    number_format: torch.dtype = getattr(torch, dtype)
    shards = _shards({name: tensor.numel() * number_format.itemsize for name, tensor in weights.items()})
    weight_map, total_bytes = {}, 0
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        ours = {name.removeprefix(_WEIGHTS): tensor for name, tensor in _read(folder, names).items()}
        theirs = {name: part.to(number_format) for name, part in to_hugging_face(ours, config.model).items()}
        save_file(theirs, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(theirs, file))
        total_bytes += sum(part.nbytes for part in theirs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        files.write_json(target / "model.safetensors.index.json", index)
    return total_bytes


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names in their order, cut where a file would become too large."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _read(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Some tensors; a run that goes on may remove its checkpoint meanwhile."""
    try:
        return read_tensors(folder, set(names).__contains__)
    except Exception as error:
        reason = why_invalid(folder, checksums=False)
        if reason is None:
            raise
        raise CheckpointError(
            f"{folder}: was removed while it was read ({reason})", hint="export a milestone's, which are kept"
        ) from error


def _tokenizer(run: RunPaths) -> dict[str, Any]:
    try:
        tokenizer: dict[str, Any] = files.read_sealed_json(run.dataset)["tokenizer"]
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{run.dataset}: names no tokenizer ({why(error)})") from None
    if not Path(tokenizer["path"]).is_dir():
        raise DataError(
            f"{tokenizer['path']}: the tokenizer that the run was trained with is gone",
            hint="bring the folder back; another run with the same corpus and tokenizer prepares it again",
        )
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    """Export; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.convert.export", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, help="none: the newest valid checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="none: as the checkpoint has it")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    written = export(load(run.config), run, arguments.step, arguments.to.absolute(), arguments.dtype)
    print(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
