"""Run instead of ``-m trainer``: the disk fails during the second checkpoint; not a test by itself.

``BAD_DISK=hang`` writes half a shard and never returns; ``BAD_DISK=fail`` fails only on rank 1. Leaving the process
group never ends then, as NCCL's does while another rank is missing from a collective.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from trainer.__main__ import main
from trainer.backends.torch_native import TorchNative
from trainer.checkpoint.shards import ShardFile
from trainer.process import follow_launcher, run_rank

_SECOND = ".tmp-step-00000100-attempt-0001"
_save = TorchNative.save


def _badly(backend: TorchNative, tensors: dict[str, Tensor], folder: Path) -> ShardFile | None:
    shard = _save(backend, tensors, folder)
    if folder.name != _SECOND:
        return shard
    if os.environ["BAD_DISK"] == "hang":
        for path in folder.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)
        time.sleep(3600)
    elif backend.rank == 1:
        raise OSError("Input/output error")
    return shard


if __name__ == "__main__":
    follow_launcher()
    TorchNative.save = _badly  # type: ignore[assignment, method-assign]
    dist.destroy_process_group = lambda *_: time.sleep(3600)
    run_rank(main)
