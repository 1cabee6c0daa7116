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

    @property
    @abstractmethod
    def _exchange(self) -> tuple[torch.device, dist.ProcessGroup | None]:
        """The group of the training thread for values of the host, and the device of its tensors; None: the default."""

    def gather(self, value: Any) -> list[Any]:
        """See :class:`trainer.backends.base.Backend`."""
        return [value] if self.world_size == 1 else gather_json(value, *self._exchange)

    def from_rank0(self, value: Any) -> Any:
        """See :class:`trainer.backends.base.Backend`."""
        return value if self.world_size == 1 else json_from_rank0(value, *self._exchange)

    def numbers_on_rank0(self, number: float) -> Tensor | None:
        """See :class:`trainer.backends.base.Backend`."""
        return torch.tensor([number]) if self.world_size == 1 else gather_numbers(number, *self._exchange)

    def gather_beside(self, value: Any) -> list[Any]:
        """See :class:`trainer.backends.base.Backend`."""
        return [value] if self._beside is None else gather_json(value, _HOST, self._beside)

    def to_rank0_beside(self, value: Any) -> list[Any]:
        """See :class:`trainer.backends.base.Backend`."""
        return [value] if self._beside is None else gather_json_on_rank0(value, self._beside)

    def from_rank0_beside(self, value: Any) -> Any:
        """See :class:`trainer.backends.base.Backend`."""
        return value if self._beside is None else json_from_rank0(value, _HOST, self._beside)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every process's JSON value: gather the lengths, then the padded texts.

    Every process receives and parses every text, so this is not for every few steps.
    """
    mine = _as_bytes(value, device)
    lengths = _gather_rows(torch.tensor([len(mine)], device=device), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    texts = _gather_rows(padded, group).cpu().numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def json_from_rank0(value: Any, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    """Return rank 0's JSON value: broadcast its length, then its text."""
    mine = _as_bytes(value if dist.get_rank(group) == 0 else None, device)
    size = torch.tensor([len(mine)], device=device)
    dist.broadcast(size, 0, group=group)
    text = mine if dist.get_rank(group) == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, 0, group=group)
    return json.loads(text.cpu().numpy().tobytes())


def gather_numbers(number: float, device: torch.device, group: dist.ProcessGroup | None) -> Tensor | None:
    """Return every process's number (world) in FP32 on rank 0, None on others.

    Between hosts only rank 0 receives. A device gathers on all: its library would connect every process with rank 0.
    """
    mine = torch.tensor([number], dtype=torch.float32, device=device)
    first = dist.get_rank(group) == 0
    if device.type != "cpu":
        numbers = _gather_rows(mine, group)
        return numbers.flatten().cpu() if first else None
    numbers = mine.new_empty(dist.get_world_size(group))
    dist.gather(mine, list(numbers.view(-1, 1)) if first else None, dst=0, group=group)
    return numbers if first else None


def _gather_rows(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return all processes' tensors (n) as rows (world, n)."""
    rows = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(rows), mine, group=group)
    return rows


def _as_bytes(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def gather_json_on_rank0(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every process's JSON value on rank 0, and nothing on others. The group is one of hosts."""
    mine = _as_bytes(value, _HOST)
    lengths = _gather_rows(torch.tensor([len(mine)]), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    texts = padded.new_empty(len(lengths), len(padded)) if dist.get_rank(group) == 0 else None
    dist.gather(padded, None if texts is None else list(texts), dst=0, group=group)
    rows = [] if texts is None else zip(texts.numpy(), lengths, strict=True)
    return [json.loads(row[:length].tobytes()) for row, length in rows]


def largest_difference(norms: Tensor, group: dist.ProcessGroup) -> float:
    """Return the largest relative difference between the processes' norms (n); 0 without norms."""
    ends = torch.cat((norms, -norms))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, smallest = ends.cpu().chunk(2)
    return max(((largest + smallest) / largest.clamp_min(1e-12)).tolist(), default=0.0)
