"""``python -m trainer.convert.serve --run-dir RUN --step N --manifest SHA256``: send weights to the parent process.

``eval.serving.model`` uses it to evaluate a checkpoint without a copy of its weights, or of their average with
``--weights ema``. First comes a line of JSON, ``{"tensors": {NAME: {"dtype", "shape"}}}``, by Hugging Face's names.
Then each line ``{"name", "slices"}`` on stdin is answered by a line ``{"shape"}`` and the values' bytes, in C order;
``slices`` has ``[start, stop, step]`` for each leading dimension. Errors are lines ``{"error": ...}``. It ends when its
stdin closes or its parent ends.

A coalesced tensor is read once: its other parts stay in memory until they are requested, at most one layer's.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from conf.of_run import of_run
from hlatctl.run import processes
from hlatctl.run.checkpoint import read_manifest, why_invalid
from hlatctl.run.errors import CheckpointError, HlatctlError, run_main, to_record
from hlatctl.run.paths import RunPaths
from trainer.convert.hugging_face import PREFIXES, Parts, Weights


def described(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return dtype (torch's name) and shape of each tensor."""
    return {
        name: {"dtype": str(part.dtype).removeprefix("torch."), "shape": list(part.shape)}
        for name, part in parts.tensors.items()
    }


def take(parts: Parts, name: str, slices: list[list[int | None]]) -> Tensor:
    """Return a tensor, or a block of it. Raises a CheckpointError if it can't be read."""
    return parts.read(name)[tuple(slice(*bounds) for bounds in slices)].contiguous()


def open_weights(run: RunPaths, step: int, manifest_sha256: str, kind: str = "trained") -> Weights:
    """Return the weights of a checkpoint whose checksums were verified before.

    Raises a CheckpointError if it no longer exists, is incomplete, or was rewritten since.
    """
    folder = run.checkpoint(step)
    if reason := why_invalid(folder, checksums=False):
        raise CheckpointError(
            f"{folder}: {reason}", hint=f"`hlatctl checkpoint ls {run.run_id}` lists the valid checkpoints"
        )
    if read_manifest(folder).sha256 != manifest_sha256:
        raise CheckpointError(f"{folder}: was written anew since it was verified", hint="repeat the command")
    return Weights.open(folder, of_run(run).during(step), kind)


def _serve(arguments: argparse.Namespace, output: BinaryIO) -> None:
    def say(**fields: Any) -> None:
        output.write(json.dumps(fields).encode() + b"\n")
        output.flush()

    try:
        run = RunPaths(arguments.run_dir.absolute())
        parts = Parts.of(open_weights(run, arguments.step, arguments.manifest, arguments.weights))
        say(tensors=described(parts))
        for line in sys.stdin:
            values = take(parts, **json.loads(line))
            say(shape=list(values.shape))
            output.write(_bytes_of(values))
            output.flush()
    except HlatctlError as error:
        say(error=to_record(error))


def _bytes_of(values: Tensor) -> memoryview:
    return values.reshape(-1).view(torch.uint8).numpy().data


def main(argv: list[str] | None = None) -> int:
    """Answer the requests on stdin; return 0 when it ends."""
    parser = argparse.ArgumentParser(prog="trainer.convert.serve", description="Send a checkpoint's weights.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--manifest", required=True, metavar="SHA256", help="of the checkpoint that was verified")
    parser.add_argument("--weights", choices=PREFIXES, default="trained")
    arguments = parser.parse_args(argv)
    output = processes.serve_parent()
    with suppress(BrokenPipeError):
        _serve(arguments, output.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
