"""Which blocks of whole tensors a process has and writes, for processes on a fake mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from trainer.chunks import chunks_of, chunks_to_write


@dataclass
class _Mesh:
    """A mesh of some sizes, at a place."""

    sizes: tuple[int, ...]
    place: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.place[axis]


@dataclass
class _Place:
    offsets: tuple[int, ...]


class _Distributed:
    """What the code uses of a DTensor, without a process group."""

    def __init__(self, part: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], mesh: _Mesh, *how: Any) -> None:
        self.part, self.shape, self.offsets, self.device_mesh, self.placements = part, shape, offsets, mesh, how

    def to_local(self) -> Tensor:
        return self.part

    def __create_chunk_list__(self) -> list[_Place]:
        return [_Place(self.offsets)]


def _tensors(tp: int, dp: int) -> dict[str, Any]:
    """The tensors of one of 2 x 4 processes: weights sliced over the first axis, norms of all, and one sharded."""
    mesh = _Mesh((2, 4), (tp, dp))
    tensors: dict[str, Any] = {
        f"w{n}": _Distributed(torch.ones(2, 3 + n), (4, 3 + n), (tp * 2, 0), mesh, Shard(0), Replicate())
        for n in range(12)
    }
    tensors |= {f"norm{n}": _Distributed(torch.ones(4), (4,), (0,), mesh, Replicate(), Replicate()) for n in range(8)}
    rows = torch.ones(1 if dp < 3 else 0, 5)  # 3 rows over 4 replicas
    return tensors | {"rows": _Distributed(rows, (3, 5), (min(dp, 3), 0), mesh, Replicate(), Shard(0))}


def test_every_block_is_written_by_exactly_one_process_and_the_work_is_shared() -> None:
    written: Counter[tuple[str, tuple[int, ...]]] = Counter()
    elements = []
    for tp in range(2):
        for dp in range(4):
            chunks = chunks_to_write(_tensors(tp, dp))
            written.update((name, chunk.offsets) for name, chunk in chunks.items())
            elements.append(sum(chunk.values.numel() for name, chunk in chunks.items() if name.startswith("w")))
    blocks: set[tuple[str, tuple[int, ...]]] = {(f"w{n}", (2 * tp, 0)) for n in range(12) for tp in range(2)}
    blocks |= {(f"norm{n}", (0,)) for n in range(8)} | {("rows", (row, 0)) for row in range(3)}
    assert written == dict.fromkeys(blocks, 1)
    assert max(elements) - min(elements) <= 2 * 14, "they differ by one block at most"


def test_a_process_reads_all_its_blocks_but_no_empty_ones() -> None:
    tensors = _tensors(1, 3)
    assert [chunk.offsets for chunk in chunks_of(tensors["w0"])] == [(2, 0)]
    assert chunks_of(tensors["rows"]) == []
    (whole,) = chunks_of(torch.zeros(2, 2))
    assert (whole.offsets, whole.shape) == ((0, 0), (2, 2))
