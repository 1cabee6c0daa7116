"""Code that the backends share: torchrun's environment variables, and exchanges over torch process groups."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config
from trainer.precision import PRECISIONS

_HOST = torch.device("cpu")


class TorchDistributed(ABC):
    """One process of a job that torchrun started, or a single process."""

    def __init__(self, config: Config) -> None:
        self._config, self._precision = config, PRECISIONS[config.precision.name]
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.warnings: list[str] = []
        #: Between the hosts; training does not use it. None: this is the only process.
        self._beside: dist.ProcessGroup | None = None
        torch.set_num_threads(config.cluster.threads_per_process)

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """See :class:`trainer.backends.base.Backend`."""

    def from_rank0(self, value: Any) -> Any:
        """See :class:`trainer.backends.base.Backend`."""
        return self.gather(value)[0]

    def gather_beside(self, value: Any) -> list[Any]:
        """See :class:`trainer.backends.base.Backend`."""
        return [value] if self._beside is None else gather_json(value, _HOST, self._beside)

    def to_rank0_beside(self, value: Any) -> list[Any]:
        """See :class:`trainer.backends.base.Backend`."""
        return [value] if self._beside is None else gather_json_on_rank0(value, self._beside)

    def from_rank0_beside(self, value: Any) -> Any:
        """See :class:`trainer.backends.base.Backend`."""
        return value if self._beside is None else broadcast_json(value, self._beside)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every process's JSON value: gather the lengths, then the padded texts."""
    world_size = dist.get_world_size(group)
    mine = _encoded(value).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    received = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(received, padded, group=group)
    pairs = zip(received, sizes, strict=True)
    return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in pairs]


def gather_json_on_rank0(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every process's JSON value on rank 0, and nothing on others. The group is one of hosts."""
    world_size, mine = dist.get_world_size(group), _encoded(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    received = [torch.empty_like(padded) for _ in range(world_size)] if dist.get_rank(group) == 0 else None
    dist.gather(padded, received, dst=0, group=group)
    pairs = zip(received or [], sizes, strict=False)
    return [json.loads(bytes(text[: int(size)].numpy())) for text, size in pairs]


def broadcast_json(value: Any, group: dist.ProcessGroup) -> Any:
    """Return rank 0's JSON value on every process. The group is one of hosts."""
    is_first = dist.get_rank(group) == 0
    text = _encoded(value) if is_first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0, group=group)
    text = text if is_first else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=0, group=group)
    return value if is_first else json.loads(bytes(text.numpy()))


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def largest_difference(norms: Tensor, group: dist.ProcessGroup) -> float:
    """Return the largest relative difference between the processes' norms (n); 0 without norms."""
    ends = torch.cat((norms, -norms))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, smallest = ends.cpu().chunk(2)
    return max(((largest + smallest) / largest.clamp_min(1e-12)).tolist(), default=0.0)
