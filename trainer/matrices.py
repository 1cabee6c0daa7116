"""The matrices of a layer's linear maps, and the part of each that a process has.

A parameter can pack the matrices of several maps: query, key and value, or gate and up (``trainer.model``). The rows
of each are every so many rows of the parameter. A matrix is divided like its parameter: over ``tp`` by rows or by
columns, and with FSDP each slice's rows over ``dp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import ModelConfig
from trainer.model import mlp_blocks


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The matrix of one linear map, divided into slices, and each slice into shards of its rows.

    Args:
        parameter: its name.
        start: first row of the map in each period.
        stop: end of its rows in each period.
        period: rows of the parameter after which the maps repeat.
        slice_rows: rows of a slice of the parameter.
        slice_columns: columns of a slice.
        slices: processes that have one each.
        slice_dim: the dimension that is divided into slices.
        shards: processes that share a slice's rows, each as FSDP divides them.
    """

    parameter: str
    start: int
    stop: int
    period: int
    slice_rows: int
    slice_columns: int
    slices: int = 1
    slice_dim: int = 0
    shards: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        rows, columns = self._rows_before(self.slice_rows), self.slice_columns
        return (rows * self.slices, columns) if self.slice_dim == 0 else (rows, columns * self.slices)

    def shard_rows(self, shard: int) -> range:
        """Return the rows of a slice of the parameter that a shard has: equal blocks, of which the last are short."""
        size = -(-self.slice_rows // self.shards)
        first = min(shard * size, self.slice_rows)
        return range(first, min(first + size, self.slice_rows))

    def piece_shape(self, shard: int) -> tuple[int, int]:
        """Return rows and columns of the matrix that a shard of any slice has."""
        rows = self.shard_rows(shard)
        return self._rows_before(rows.stop) - self._rows_before(rows.start), self.slice_columns

    def rows_in(self, shard: int) -> Tensor | None:
        """Return which rows of a shard are the matrix's (rows); None: all."""
        if self.period == self.stop - self.start:
            return None
        rows = self.shard_rows(shard)
        place = torch.arange(rows.start, rows.stop) % self.period
        return torch.nonzero((place >= self.start) & (place < self.stop)).flatten()

    def assemble(self, pieces: list[list[Tensor]]) -> Tensor:
        """Return the whole matrix from the pieces of each slice's shards."""
        return torch.cat([torch.cat(shards) for shards in pieces], self.slice_dim)

    def divide(self, whole: Tensor) -> list[list[Tensor]]:
        """Return the pieces of each slice's shards, as views of the whole."""
        sizes = [self.piece_shape(shard)[0] for shard in range(self.shards)]
        return [list(torch.split(part, sizes)) for part in torch.chunk(whole, self.slices, self.slice_dim)]

    def _rows_before(self, row: int) -> int:
        """Return how many of a slice's first rows are the matrix's."""
        periods, rest = divmod(row, self.period)
        return periods * (self.stop - self.start) + min(max(rest - self.start, 0), self.stop - self.start)


def packed_rows(name: str, model: ModelConfig) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and period of the rows of each linear map in a layer's parameter; nothing for other parameters.

    Args:
        name: of the parameter.
        model: its shape.
    """
    head = model.head_width
    sizes: dict[str, tuple[int, ...]] = {
        "attention.qkv.weight": (model.num_heads // model.num_kv_heads * head, head, head),
        "attention.o.weight": (1,),
        "mlp.gate_up.weight": (model.intermediate_size // mlp_blocks(model),) * 2,
        "mlp.down.weight": (1,),
    }
    rows = next((rows for end, rows in sizes.items() if name.endswith(end)), ())
    for index, size in enumerate(rows):
        start = sum(rows[:index])
        yield start, start + size, sum(rows)
