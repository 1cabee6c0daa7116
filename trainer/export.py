"""``python -m trainer.export --run-dir RUN --step N --to DIR``: a checkpoint as a Hugging Face LLaMA folder.

Only the weights are read. The coalesced layers are cut apart again; nothing else changes, so logits are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conf.load import load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import CheckpointError, StorageError, run_main
from hlatctl.run.manifest import why_invalid
from hlatctl.run.paths import RunPaths
from trainer.hugging_face import hugging_face_config, to_hugging_face
from trainer.storage import read_tensors

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "model."

_PREFIX = "model."


def export(config: Config, run: RunPaths, step: int, target: Path) -> None:
    """Write the folder, whole or not at all.

    Raises:
        CheckpointError: there is no valid checkpoint of that step.
        StorageError: the folder can't be written.
    """
    from safetensors.torch import save_file

    weights = to_hugging_face(read_weights(run, step), config.model)
    tokenizer = files.read_json(run.dataset)["tokenizer"]
    dtype = str(weights["model.norm.weight"].dtype).removeprefix("torch.")
    described = hugging_face_config(
        config.model, seq_len=config.train.seq_len, bos_id=tokenizer["bos_id"], eos_id=tokenizer["eos_id"], dtype=dtype
    )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(tokenizer["path"], partial)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        files.write_json(partial / "config.json", described)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        raise StorageError(f"{target}: can't be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_weights(run: RunPaths, step: int) -> dict[str, Tensor]:
    """The weights of a checkpoint by our names, whole, whatever layout wrote them; moments stay on the disk."""
    folder = run.checkpoint(step)
    reason = why_invalid(folder)
    if reason:
        raise CheckpointError(f"{folder}: {reason}", hint="export the checkpoint of another step")
    tensors = read_tensors(folder, lambda name: name.startswith(_PREFIX))
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def main(argv: list[str] | None = None) -> int:
    """Export; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.export", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    export(load(run.config), run, arguments.step, arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
