"""Run under torchrun by ``scale_checkpoints``: all ranks save twice and restore; not a benchmark by itself.

    checkpoint_ranks.py FOLDER

Two tensor-parallel slices, and rows sharded over the rest.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.compose import compose
from hlatctl.run.checkpoint import read_manifest, why_invalid
from hlatctl.run.errors import run_main
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from trainer.backends.torch_native import TorchNative
from trainer.checkpoint.manager import CheckpointManager, rng_state
from trainer.checkpoint.shards import SUFFIX, chunks_of
from trainer.process import follow_launcher

_OVERRIDES = [
    "model=llama_tiny",
    "parallel=fsdp",
    "parallel.tensor_parallel_size=2",
    "backend.compile=false",
    "eval.enabled=false",
]


def main() -> int:
    run, world_size = RunPaths(Path(sys.argv[1])), os.environ["WORLD_SIZE"]
    sizes = [f"cluster.processes_per_node={world_size}", f"train.global_batch_size={world_size}"]
    config = compose([*_OVERRIDES, *sizes, f"runs_dir={run.root.parent}"])
    backend = TorchNative(config)
    tensors = backend.optimizer(backend.build_model(document_end_id=None)).tensors()
    journal = JournalWriter(run, train_writer(0)) if backend.rank == 0 else None
    checkpoints = CheckpointManager(config, run, backend, journal)
    assert checkpoints.restore(tensors, checkpoints.choose()) is None
    own = {"loader": [[1, backend.rank]], "rng": rng_state()}
    for step in (1, 2):
        _fill(tensors, step)
        began_s = time.perf_counter()
        checkpoints.save(tensors, step=step, tokens=step, reason="interval", shared={}, own=own)
        checkpoints.wait()
        _print(backend, f"save {step}, to a verified checkpoint", time.perf_counter() - began_s)
    _fill(tensors, 0)
    began_s = time.perf_counter()
    restored = checkpoints.restore(tensors, checkpoints.choose())
    _print(backend, "restore", time.perf_counter() - began_s)
    assert restored is not None
    assert restored.step == 2
    assert len(restored.loader) == backend.world_size
    assert all(torch.all(chunk.values == value) for chunk, value in _values(tensors, 2)), "other values came back"
    if backend.rank == 0:
        folder = run.checkpoint(2)
        shards = [entry for entry in read_manifest(folder).files if entry["path"].endswith(SUFFIX)]
        assert why_invalid(folder) is None
        assert len(shards) == backend.world_size
        print(f"  {world_size} processes: {len(shards)} shards; every tensor of every process came back")
    backend.gather(None)
    backend.close()
    return 0


def _values(tensors: dict[str, Tensor], step: int) -> list[Any]:
    """Return each block of this process, and a number that only it and its replicas have."""
    return [
        (chunk, step * (1 + number + sum(chunk.offsets)))
        for number, tensor in enumerate(tensors.values())
        for chunk in chunks_of(tensor)
    ]


def _fill(tensors: dict[str, Tensor], step: int) -> None:
    for chunk, value in _values(tensors, step):
        chunk.values.fill_(value)


def _print(backend: TorchNative, what: str, own_s: float) -> None:
    slowest_s = max(backend.gather(own_s))
    if backend.rank == 0:
        print(f"  {what}: {slowest_s:.2f} s", flush=True)


if __name__ == "__main__":
    follow_launcher()
    sys.exit(run_main(main))
