"""``torchrun -m trainer.convert.nxd_exchange --run-dir RUN``: convert between our and NxD's format.

Use ``[--step N] --to DIR`` to export a checkpoint to the format of NeuronX Distributed, or ``--from DIR`` to import
one. Runs on backend nxd write our common format (docs/decisions/0018). Uses the library's ``save_checkpoint`` and
``load_checkpoint``, with the run's processes and layout. torch's restricted unpickler loads the library's files: it
accepts only tensors and plain values.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.initial_weights import MODEL
from conf.of_run import of_run
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest, write_manifest
from hlatctl.run.errors import CheckpointError, ConfigError
from hlatctl.run.files import new_folder, parse_json, reading
from hlatctl.run.paths import RunPaths, step_name
from trainer.checkpoint.shards import INDEX, ShardIndex, StoredChunk, compose, read_index
from trainer.process import run_rank

if TYPE_CHECKING:
    from trainer.backends.nxd import Nxd

_FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def to_library(backend: Nxd, run: RunPaths, step: int | None, target: Path) -> dict[str, Any]:
    """Write a checkpoint in the library's format, with the tag ``step-N``; all processes call this.

    The library's user content holds the checkpoint's other files, such as the loader's state.
    """
    import neuronx_distributed as nxd

    from trainer.convert.export import choose

    folder = Path(backend.from_rank0(os.fspath(choose(run, step)) if backend.rank == 0 else None))
    manifest = read_manifest(folder)
    optimizer = _build(backend)
    backend.load(optimizer.tensors(), folder, ShardIndex(backend.from_rank0_beside(_index_text(backend, folder))))()
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
    nxd.finalize_checkpoint()  # writes the mark of the last checkpoint (checkpoint.py:198)
    return {"step": manifest.step, "tokens": manifest.tokens, "to": os.fspath(target)}


def from_library(backend: Nxd, config: Config, source: Path, target: Path) -> dict[str, Any]:
    """Write a checkpoint in our format from the library's newest checkpoint; all processes call this.

    A source that :func:`to_library` wrote becomes a complete checkpoint of its run. Any other becomes tensors only, for
    ``train.init_from``.
    """
    import neuronx_distributed as nxd
    import torch
    from torch_xla.utils.serialization import TensorReference

    if not nxd.trainer.checkpoint.has_checkpoint(os.fspath(source)):
        raise CheckpointError(f"--from={source}: has no complete checkpoint of NeuronX Distributed")
    os.environ[_FORCE_SAFE] = "1"
    torch.serialization.add_safe_globals([TensorReference])
    optimizer = _build(backend)
    # Load into dictionaries: loaded into the optimizer, ZeRO-1 would start from weights that are not loaded yet.
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    content = nxd.load_checkpoint(os.fspath(source), model=model, optimizer=state)
    optimizer.take_over(model, state)
    backend.step_boundary()
    described: dict[str, Any] = {"step": 0, "tokens": 0, "world": {}, "files": {}}
    if isinstance(content, str):
        with reading(source):
            described = parse_json(content)
    with new_folder(target) if backend.rank == 0 else nullcontext() as filled:
        partial = Path(backend.from_rank0(os.fspath(filled) if filled else None))
        shard = backend.save(backend.for_writing(optimizer.tensors()), partial)
        stored = backend.to_rank0_beside([shard.entry["path"], shard.chunks] if shard else None)
        if backend.rank == 0:
            shards = {path: [StoredChunk(*chunk) for chunk in chunks] for path, chunks in filter(None, stored)}
            files.write_text(partial / INDEX, compose(shards).text)
            for name, value in {MODEL: asdict(config.model), **described["files"]}.items():
                files.write_json(partial / name, value)
            write_manifest(partial, step=described["step"], tokens=described["tokens"], world=described["world"])
    backend.gather(None)
    return {"step": described["step"], "tokens": described["tokens"], "to": os.fspath(target)}


def _index_text(backend: Nxd, folder: Path) -> str | None:
    return read_index(folder).text if backend.rank == 0 else None


def _build(backend: Nxd) -> Any:
    return backend.optimizer(backend.build_model(document_end_id=None))


def main(argv: list[str] | None = None) -> int:
    """Convert a checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(prog="trainer.convert.nxd_exchange", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, help="default: the newest valid checkpoint")
    parser.add_argument("--from", dest="source", type=Path, help="the library's folder; default: write one")
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    config = of_run(run, read=files.read_shared_text)
    if config.backend.name != "nxd":
        raise ConfigError(
            f"backend.name={config.backend.name}: must be nxd, because the library's checkpoints need its processes",
            hint="start a run on backend nxd from any run's checkpoint with train.init_from=DIR",
        )
    from trainer.backends.nxd import Nxd

    backend = Nxd(config)
    if arguments.source is None:
        written = to_library(backend, run, arguments.step, arguments.to.absolute())
    else:
        written = from_library(backend, config, arguments.source.absolute(), arguments.to.absolute())
    backend.close()  # not after an error: see `run_rank`
    if backend.rank == 0:
        print(json.dumps(written))
    return 0


if __name__ == "__main__":
    run_rank(main)
