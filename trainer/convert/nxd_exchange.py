"""``torchrun -m trainer.convert.nxd_exchange --run-dir RUN [--step N] --to DIR``, or ``--from DIR``.

A run on backend nxd writes the checkpoints that every backend writes (docs/decisions/0018). Scripts of NeuronX
Distributed want the library's, and have such to give: both ways through its own ``save_checkpoint`` (tensor by tensor,
beside the processes) and ``load_checkpoint``, with the run's processes and layout. What the library loads is unpickled
by torch's restricted unpickler, which knows tensors and plain values and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.initial_weights import MODEL
from conf.load import load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.atomic import new_folder
from hlatctl.run.errors import CheckpointError, ConfigError, run_main
from hlatctl.run.manifest import read_manifest, write_manifest
from hlatctl.run.paths import RunPaths, step_name
from hlatctl.run.reading import parse_json, reading

if TYPE_CHECKING:
    from trainer.backends.nxd import Nxd

_FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def to_library(backend: Nxd, run: RunPaths, step: int | None, target: Path) -> dict[str, Any]:
    """Write a checkpoint of the run as the library's, under the tag ``step-N``; all processes together.

    The library's user content is what the checkpoint has besides tensors: the loader's state among it.
    """
    import neuronx_distributed as nxd

    from trainer.convert.export import choose

    folder = Path(backend.from_rank0(os.fspath(choose(run, step)) if backend.rank == 0 else None))
    manifest = read_manifest(folder)
    optimizer = _build(backend)
    backend.load(optimizer.tensors(), folder)
    names = [entry["path"] for entry in manifest.files if entry["path"].endswith(".json") and entry["path"] != MODEL]
    with reading(folder):
        content: dict[str, Any] = {
            "step": manifest.step,
            "tokens": manifest.tokens,
            "world": manifest.world,
            "files": {name: files.read_json(folder / name) for name in sorted(names)},
        }
        optimizer.loaded(int(content["files"]["state.json"]["optimizer_steps"]))
    nxd.save_checkpoint(
        os.fspath(target),
        step_name(manifest.step),
        model=backend.nxd_model,
        optimizer=optimizer.library,
        user_content=json.dumps(content),
        use_xser=True,
        async_save=True,
        num_kept_ckpts=None,
    )
    nxd.finalize_checkpoint()  # otherwise the last one would be left without its mark (checkpoint.py:198)
    return {"step": manifest.step, "tokens": manifest.tokens, "to": os.fspath(target)}


def from_library(backend: Nxd, config: Config, source: Path, target: Path) -> dict[str, Any]:
    """Make a checkpoint of ours from the library's newest; all processes together.

    One that :func:`to_library` wrote is a checkpoint of its run again; of any other there are tensors alone, which
    ``train.init_from`` takes.
    """
    import neuronx_distributed as nxd
    import torch
    from torch_xla.utils.serialization import TensorReference

    if not nxd.trainer.checkpoint.has_checkpoint(os.fspath(source)):
        raise CheckpointError(f"--from={source}: holds no complete checkpoint of NeuronX Distributed")
    os.environ[_FORCE_SAFE] = "1"
    torch.serialization.add_safe_globals([TensorReference])
    optimizer = _build(backend)
    # Into dictionaries: loaded into the optimizer, ZeRO-1 would begin from weights that are not there yet.
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    content = nxd.load_checkpoint(os.fspath(source), model=model, optimizer=state)
    optimizer.take_over(model, state)
    backend.step_boundary()
    told: dict[str, Any] = {"step": 0, "tokens": 0, "world": {}, "files": {}}
    if isinstance(content, str):
        with reading(source):
            told = parse_json(content)
    with new_folder(target) if backend.rank == 0 else nullcontext() as filled:
        partial = Path(backend.from_rank0(os.fspath(filled) if filled else None))
        backend.save(optimizer.tensors(), partial)
        if backend.rank == 0:
            for name, value in {MODEL: asdict(config.model), **told["files"]}.items():
                files.write_json(partial / name, value)
            write_manifest(partial, step=told["step"], tokens=told["tokens"], world=told["world"])
    backend.gather(None)
    return {"step": told["step"], "tokens": told["tokens"], "to": os.fspath(target)}


def _build(backend: Nxd) -> Any:
    return backend.optimizer(backend.build_model(document_end_id=None))


def main(argv: list[str] | None = None) -> int:
    """Convert; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.convert.nxd_exchange", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, help="none: the newest valid checkpoint")
    parser.add_argument("--from", dest="source", type=Path, help="the library's folder; none: it is written")
    parser.add_argument("--to", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    config = load(run.config)
    if config.backend.name != "nxd":
        raise ConfigError(
            f"backend.name={config.backend.name}: the library's checkpoints are cut as its own processes are laid out",
            hint="a run on backend nxd may begin from any run's checkpoint: train.init_from",
        )
    from trainer.backends.nxd import Nxd

    backend = Nxd(config)
    try:
        if arguments.source is None:
            told = to_library(backend, run, arguments.step, arguments.to.absolute())
        else:
            told = from_library(backend, config, arguments.source.absolute(), arguments.to.absolute())
    finally:
        backend.close()
    if backend.rank == 0:
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
