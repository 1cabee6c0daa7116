"""``python -m trainer.convert.export --run-dir RUN [--step N] --to DIR``: export a checkpoint to Hugging Face.

Reads only the weights, a few gigabytes at a time. Splits the coalesced layers and changes nothing else, so logits are
equal. With ``--link``, the folder also names the checkpoint; with ``--link=only`` it has no weights, and only ``eval``
reads such a folder. With ``--format megatron``, the folder is one that Megatron-LM loads. Prints a summary as one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.of_run import of_run
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checkpoint import folder_steps, read_manifest, why_invalid
from hlatctl.run.errors import CheckpointError, DataError, run_main
from hlatctl.run.files import DAMAGED, new_folder, why
from hlatctl.run.model_folder import write_link
from hlatctl.run.paths import RunPaths
from trainer.checkpoint.shards import WEIGHTS, grouped, read_tensors
from trainer.convert.hugging_face import PREFIXES, Weights

DTYPES = ("float32", "bfloat16")
#: A file of the exported model holds at most this, unless a single tensor is larger.
_SHARD_BYTES = 5 << 30


def export(
    config: Config,
    run: RunPaths,
    step: int | None,
    target: Path,
    dtype: str | None = None,
    *,
    kind: str = "trained",
    link: Literal["", "also", "only"] = "",
    layout: Literal["hf", "megatron"] = "hf",
) -> dict[str, Any]:
    """Write the folder atomically.

    Args:
        step: step of the checkpoint; None: the newest valid one.
        dtype: dtype of the exported weights, one of :data:`DTYPES`; None: the checkpoint's.
        kind: ``trained``, or ``ema`` for the average of the weights.
        link: link to the checkpoint, besides its weights or instead of them; linked ones keep the checkpoint's dtype.
        layout: Hugging Face's, or Megatron's.

    Returns:
        ``{"step", "tokens", "to", "parameters", "dtype", "bytes", "left_out"}``; the last one are names of weights that
        the Hugging Face model doesn't have.

    Raises:
        CheckpointError: there is no valid checkpoint of that step, or it has no weights.
        DataError: the run's tokenizer is missing.
        StorageError: the folder exists, or can't be written.
    """
    tokenizer = tokenizer_of(run)
    if layout == "megatron":
        from trainer.convert.megatron import check_model  # takes seconds
        from trainer.convert.megatron import write as write_megatron

        check_model(config.model)
    with new_folder(target) as partial:
        folder = choose(run, step)
        manifest = read_manifest(folder)  # before the weights: training may delete the checkpoint while they are read
        config = config.during(manifest.step)
        weights = Weights.open(folder, config, kind)
        stored = next(iter(weights.ours.values())).dtype
        named = dtype or str(stored).removeprefix("torch.")
        if layout == "megatron":
            size = write_megatron(
                weights, partial, config=config, dtype=named, step=manifest.step, tokenizer=(tokenizer["path"], target)
            )
        else:
            size = write_model(
                weights, partial, config=config, tokenizer=tokenizer, dtype=named, with_weights=link != "only"
            )
            if link:
                write_link(
                    partial,
                    run_dir=run.root,
                    step=manifest.step,
                    manifest_sha256=manifest.sha256,
                    weights=kind,
                    left_out=weights.left_out,
                )
    parameters = sum(tensor.numel() for tensor in weights.ours.values())
    return {
        "step": manifest.step,
        "tokens": manifest.tokens,
        "to": os.fspath(target),
        "parameters": parameters,
        "dtype": named,
        "bytes": size,
        "left_out": list(weights.left_out),
    }


def choose(run: RunPaths, step: int | None) -> Path:
    """Return the folder of a step's checkpoint, or of the newest valid one, after verifying the checksums of all files.

    Raises:
        CheckpointError: no checkpoint is valid.
    """
    steps = folder_steps(run)
    if step is not None and step not in steps:
        others = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{run.checkpoint(step)}: no such checkpoint", hint=f"steps with a checkpoint: {others}")
    reasons = []
    for candidate in [step] if step is not None else reversed(steps):
        folder = run.checkpoint(candidate)
        reason = why_invalid(folder)
        if reason is None:
            return folder
        reasons.append(f"step {candidate}: {reason}")
    why_not = "; ".join(reasons) or "none was written"
    raise CheckpointError(
        f"{run.checkpoints}: no valid checkpoint ({why_not})", hint=f"`hlatctl checkpoint ls {run.run_id}` lists them"
    )


def read_weights(run: RunPaths, step: int) -> dict[str, Tensor]:
    """Return a checkpoint's complete weights by our names, for any layout; the moments are not read."""
    tensors = read_tensors(choose(run, step), lambda name: name.startswith(WEIGHTS))
    return {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items()}


class _Readable(Protocol):
    """Weights by our names, which are read in parts by Hugging Face's."""

    ours: dict[str, Tensor]

    def read(self, ours: Sequence[str]) -> dict[str, Tensor]: ...

    def config(self, *, seq_len: int, bos_id: int, eos_id: int, dtype: str) -> dict[str, Any]: ...


def write_model(
    weights: _Readable,
    folder: Path,
    *,
    config: Config,
    tokenizer: dict[str, Any],
    dtype: str,
    with_weights: bool = True,
) -> int:
    """Write tokenizer, weights and ``config.json`` into a Hugging Face folder; return the weights' bytes.

    Args:
        config: of a run that trained the model.
        tokenizer: from :func:`tokenizer_of`.
    """
    shutil.copytree(tokenizer["path"], folder, dirs_exist_ok=True)
    size = _write_weights(weights, folder, dtype) if with_weights else 0
    ids = {key: tokenizer[key] for key in ("bos_id", "eos_id")}
    described = weights.config(seq_len=config.train.seq_len, dtype=dtype, **ids)
    files.write_json(folder / "config.json", described)
    return size


def _write_weights(weights: _Readable, target: Path, dtype: str) -> int:
    """Write files of up to ``_SHARD_BYTES``, with an index if there are several; return the weights' bytes."""
    number_format: torch.dtype = getattr(torch, dtype)
    sizes = {name: tensor.numel() * number_format.itemsize for name, tensor in weights.ours.items()}
    shards = grouped(sizes, _SHARD_BYTES)
    weight_map, total_bytes = {}, 0
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        theirs = {name: part.to(number_format) for name, part in weights.read(names).items()}
        save_file(theirs, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(theirs, file))
        total_bytes += sum(part.nbytes for part in theirs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        files.write_json(target / "model.safetensors.index.json", index)
    return total_bytes


def tokenizer_of(run: RunPaths) -> dict[str, Any]:
    """Return ``{"path", "bos_id", "eos_id", …}`` of a run's tokenizer. Raises a DataError if it is missing."""
    try:
        tokenizer: dict[str, Any] = files.read_sealed_json(run.dataset)["tokenizer"]
    except (OSError, *DAMAGED) as error:
        raise DataError(
            f"{run.dataset}: names no tokenizer ({why(error)})",
            hint=f"name a run that has trained; `hlatctl status {run.run_id}` shows how far it got",
        ) from None
    if not Path(tokenizer["path"]).is_dir():
        raise DataError(
            f"{tokenizer['path']}: the run's tokenizer is missing",
            hint="restore the folder, or prepare it again with another run of the same corpus and tokenizer",
        )
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    """Export a checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(prog="trainer.convert.export", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, help="default: the newest valid checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of written weights; default: the checkpoint's")
    parser.add_argument("--weights", choices=PREFIXES, default="trained", help="ema: their average")
    parser.add_argument("--link", choices=("also", "only"), default="", help="link to the checkpoint; only: no weights")
    parser.add_argument("--format", choices=("hf", "megatron"), default="hf", help="default: Hugging Face's")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    target = arguments.to.absolute()
    choices = {"kind": arguments.weights, "link": arguments.link, "layout": arguments.format}
    written = export(of_run(run), run, arguments.step, target, arguments.dtype, **choices)
    print(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
