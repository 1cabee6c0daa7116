"""Tensor-parallel processes that share a key/value head, there being fewer heads than processes: who has what.

Each of them has some of the query heads that go with the key/value head, then a copy of the key head and of the value
head. So its slice of query/key/value is two ranges of rows of the whole weight, and its slice of the output projection
has the columns of its own query heads, whatever its rank. In memory that is the slice of a model with as many key/value
heads as processes; a checkpoint has each of them once, as that of any layout. Who shares is the backend's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from conf.schema import ModelConfig
from hlatctl.run.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of a whole matrix, along the dimension that is cut; ``writes``: this process writes it for all."""

    start: int
    stop: int
    writes: bool = True


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a process's slice of a parameter lies in the whole.

    Args:
        dim: that is cut.
        whole_size: of the whole, along it.
        pieces: the slice's, in its order. Those that are written are one piece for each process.
        copied_rows: so many of the slice's last rows are copies of what other processes have.
        sharers: processes that have them, this one among them.
    """

    dim: int
    whole_size: int
    pieces: tuple[Piece, ...]
    copied_rows: int = 0
    sharers: int = 1

    def whole_shape(self, shape: list[int]) -> list[int]:
        """Of the parameter, from that of a slice or of some rows of it."""
        return [self.whole_size if axis == self.dim else size for axis, size in enumerate(shape)]

    def take(self, whole: Tensor) -> Tensor:
        """The slice of a whole parameter."""
        ranges = [whole.narrow(self.dim, piece.start, piece.stop - piece.start) for piece in self.pieces]
        return torch.cat(ranges, self.dim)

    def weights_of_rows(self, rows: int) -> Tensor:
        """One over how many processes have each of the slice's rows, FP32 (rows, 1): their sum counts it once."""
        weights = torch.ones(rows, 1)
        weights[rows - self.copied_rows :] /= self.sharers
        return weights

    def described(self, part: Tensor, first_row: int, rows: int) -> Pieces:
        """Some rows of a slice that has so many, with where they lie in the whole."""
        whole = [rows, *part.shape[1:]]
        whole[self.dim] = self.whole_size
        if self.dim != 0:
            return Pieces.of(part, whole, [(part, (first_row, self.pieces[0].start), True)] if len(part) else [])
        found, before = [], 0
        for piece in self.pieces:
            start = max(before, first_row)
            before += piece.stop - piece.start
            stop = min(before, first_row + part.shape[0])
            if start < stop:
                row = piece.stop - before + start
                found.append((part[start - first_row : stop - first_row], (row, 0), piece.writes))
        return Pieces.of(part, whole, found)


@dataclass(frozen=True, kw_only=True)
class SharedHeads:
    """A process's place among those that have a layer together.

    Args:
        model: its shape.
        head: the key/value head that it has, 0-based.
        part: which part of that head's query heads, 0-based.
        sharers: into how many parts they are cut.
    """

    model: ModelConfig
    head: int
    part: int
    sharers: int

    @classmethod
    def of(cls, model: ModelConfig, rank: int, tp_ranks: list[int], groups: list[list[int]]) -> SharedHeads:
        """The place of a rank.

        Args:
            model: its shape.
            rank: among all processes.
            tp_ranks: of the processes that have each layer together with it.
            groups: ranks of those that share a key/value head, of all processes.

        Raises:
            ConfigError: the groups are not parts of these processes.
        """
        groups = [group for group in groups if set(group) <= set(tp_ranks)]
        if len(groups) != model.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads={model.num_kv_heads}, parallel.tensor_parallel_size={len(tp_ranks)}: the "
                "library's groups for key/value heads do not lie within its tensor-parallel groups (those of 4 "
                "processes it spreads over a trn1 node)",
                hint="set parallel.tensor_parallel_size to another multiple of model.num_kv_heads, or to a divisor",
            )
        head = next(number for number, group in enumerate(groups) if rank in group)
        return cls(model=model, head=head, part=groups[head].index(rank), sharers=len(groups[head]))

    def cut(self, name: str) -> Cut | None:
        """Of a parameter by its name; none if the slices of that one lie in order of the processes' ranks."""
        if name.endswith("attention.qkv.weight"):
            return self._cut_of_qkv()
        if name.endswith("attention.o.weight"):
            columns = self._queries * self.model.head_dim
            start = (self.head * self.sharers + self.part) * columns
            piece = Piece(start=start, stop=start + columns)
            return Cut(dim=1, whole_size=self.model.num_heads * self.model.head_dim, pieces=(piece,))
        return None

    def _cut_of_qkv(self) -> Cut:
        """The last part's query heads lie before the key head and the value head, so it writes all as one piece."""
        queries, copies = self._queries * self.model.head_dim, 2 * self.model.head_dim
        group = self.sharers * queries + copies
        start, stop = self.head * group + self.part * queries, (self.head + 1) * group
        pieces: tuple[Piece, ...] = (Piece(start=start, stop=stop),)
        if self.part < self.sharers - 1:
            pieces = (Piece(start=start, stop=start + queries), Piece(start=stop - copies, stop=stop, writes=False))
        whole = self.model.num_kv_heads * group
        return Cut(dim=0, whole_size=whole, pieces=pieces, copied_rows=copies, sharers=self.sharers)

    @property
    def _queries(self) -> int:
        """Query heads of a process."""
        return self.model.num_heads // (self.model.num_kv_heads * self.sharers)


class Pieces(Tensor):
    """A process's part of a tensor that is cut as no DTensor can say: that asks for equal slices.

    It is the part itself, with what torch.distributed.checkpoint asks of any tensor that tells its chunks (as DTensor
    does): ``size()`` is the whole's. What is computed from it is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _whole: torch.Size
    _chunks: list[tuple[Tensor, torch.Size, bool]]

    @classmethod
    def of(cls, part: Tensor, whole: list[int], chunks: list[tuple[Tensor, tuple[int, int], bool]]) -> Pieces:
        """A part.

        Args:
            part: all that this process has.
            whole: shape of the tensor that it is a part of.
            chunks: views of the part, where each lies in the whole, and whether this process writes it.
        """
        pieces = part.as_subclass(cls)
        pieces._whole = torch.Size(whole)
        pieces._chunks = [(chunk, torch.Size(offsets), writes) for chunk, offsets, writes in chunks]
        return pieces

    def to_local(self) -> Tensor:
        """The part, a plain tensor."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole."""
        return self._whole if dim is None else self._whole[dim]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        """What of it this process writes."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=chunk.size()),
                    properties=TensorProperties.create_from_tensor(chunk),
                    size=self._whole,
                ),
            )
            for chunk, offsets, writes in self._chunks
            if writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What of it is read."""
        return [ChunkStorageMetadata(offsets=offsets, sizes=chunk.size()) for chunk, offsets, _ in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The chunk that lies there."""
        return next(chunk for chunk, offsets, _ in self._chunks if offsets == index.offset)
