"""Run by torchrun with folders of runs: change one process's replica of a weight, and check that all detect it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from conf.load import load
from hlatctl.run.paths import RunPaths
from trainer.backends.torch_native import TorchNative


def main() -> None:
    for folder in sys.argv[1:]:
        backend = TorchNative(load(RunPaths(Path(folder)).config))
        model = backend.build_model(document_end_id=None)
        optimizer = backend.optimizer(model)
        assert backend.drift(optimizer) == 0.0
        if backend.rank == 1:
            with torch.no_grad():
                model.get_parameter("layers.1.mlp_norm.weight").mul_(1.01)
        drift = backend.drift(optimizer)
        assert 0.009 < drift < 0.011, drift
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
