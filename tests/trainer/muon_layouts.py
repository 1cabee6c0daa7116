"""Run by torchrun with folders of runs: each layout's updates are the bits of one process's for equal gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from conf.load import load
from hlatctl.run.paths import RunPaths
from trainer.backends.torch_native import TorchNative
from trainer.model.decoder import Llama, initialize, slice_dim
from trainer.optim.adamw import ParameterShard, local
from trainer.optim.muon import Muon
from trainer.parallel.layout import Layout

_STEPS = 3


def piece(name: str, whole: Tensor, layout: Layout) -> Tensor:
    """Return this process's piece of a whole parameter."""
    assert layout.mesh is not None
    dim = slice_dim(name)
    if dim is not None:
        whole = torch.chunk(whole, layout.mesh["tp"].size(), dim)[layout.mesh.get_local_rank("tp")]
    if layout.shards_parameters:
        shards, shard = layout.mesh["dp"].size(), layout.mesh.get_local_rank("dp")
        size = -(-len(whole) // shards)
        whole = whole[shard * size : (shard + 1) * size]
    return whole


def main() -> None:
    for folder in sys.argv[1:]:
        config = load(RunPaths(Path(folder)).config)
        backend = TorchNative(config)
        ours = backend.optimizer(backend.build_model(document_end_id=None))
        assert isinstance(ours, Muon)
        model = Llama(config.model, config.train.seq_len)
        initialize(model, config.model, config.seed)
        named = dict(model.named_parameters())
        shards = {name: ParameterShard(parameter=parameter) for name, parameter in named.items()}
        alone = Muon(shards, config.optimizer, model=config.model)
        present = dict(ours.parameters())
        generator = torch.Generator().manual_seed(1)
        for number in range(1, _STEPS + 1):
            for name, parameter in named.items():
                gradient = torch.randn(parameter.shape, generator=generator)
                alone.gradient(name).copy_(gradient)
                if name in present:  # in this pipeline stage
                    ours.gradient(name).copy_(piece(name, gradient, backend._layout))
            for optimizer in (alone, ours):
                optimizer.step(lr=1e-2, number=number)
        values = ours.tensors()
        wholes = alone.tensors()
        matrices = [name for name in values if "layers." in name and wholes[name].ndim == 2]
        assert len(matrices) == 2 * 4 * len(backend._layout.layers)
        for name in matrices:
            expected = piece(name.partition(".")[2], wholes[name], backend._layout)
            torch.testing.assert_close(local(values[name]), expected, rtol=0, atol=0, msg=f"{folder}: {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
