"""The collectives of tensor-parallel layers, and the shards of processes that share a key/value head.

Each collective has its conjugate in the backward pass. They are functional collectives, so they can be part of a
compiled graph. Sources: Megatron-LM, arXiv 1909.08053; for sequence parallelism, arXiv 2205.05198, section 4.2.

If there are fewer key/value heads than processes, several processes share a head. Each of them has some of the head's
query heads, followed by a replica of the key head and of the value head. So its shard of query/key/value is two row
ranges of the whole weight. Its shard of the output projection has the columns of its own query heads, regardless of its
rank. In memory this equals the shard of a model with as many key/value heads as processes. A checkpoint has each head
once, like that of any layout. The backend decides which processes share a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ProcessGroup

from conf.schema import ModelConfig
from hlatctl.run.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


_SEQUENCE = 1
# PyTorch 2.13 has new names, and warns about the old ones.
_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """A tensor-parallel group.

    With ``sequence``, each process has only a slice of the sequence between :meth:`leave` and :meth:`enter`.
    """

    group: ProcessGroup
    rank: int
    size: int
    sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole (batch, seq, hidden) on every process; for the input of a column-parallel layer."""
        exchange = _Gather if self.sequence else _Copy
        return exchange.apply(x, self.group.group_name, self.size)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' (batch, seq, hidden); for the output of a row-parallel layer."""
        exchange = _Scatter if self.sequence else _Sum
        return exchange.apply(x, self.group.group_name, self.size)  # type: ignore[no-any-return,no-untyped-call]

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' x; each process computes different things from it."""
        summed = _Sum.apply(x, self.group.group_name, self.size)  # type: ignore[no-untyped-call]
        return _Copy.apply(summed, self.group.group_name, self.size)  # type: ignore[no-any-return,no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _sum(gradients[0], ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _gather(x, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradients[0], ctx.group, ctx.size), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupName, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _scatter(x, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradients[0], ctx.group, ctx.size), None, None


def _sum(x: Tensor, group: GroupName) -> Tensor:
    return _done(functional.all_reduce(x.contiguous(), "sum", group))


def _gather(x: Tensor, group: GroupName, size: int) -> Tensor:
    """Concatenate the slices of the sequence, on every process."""
    return torch.cat(_done(_all_gather(x.contiguous(), 0, group)).chunk(size), dim=_SEQUENCE)


def _scatter(x: Tensor, group: GroupName, size: int) -> Tensor:
    """Sum over all processes; each gets its slice of the sequence."""
    return _done(_reduce_scatter(torch.cat(x.chunk(size, dim=_SEQUENCE)), "sum", 0, group))


def _done(x: Tensor) -> Tensor:
    return functional.wait_tensor(x)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class ShardRange:
    """A range of a whole matrix along the sharded dimension; ``writes``: this process writes it to checkpoints."""

    start: int
    stop: int
    writes: bool = True


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Where a process's shard of a parameter is in the whole parameter.

    Args:
        dim: the sharded dimension.
        global_size: size of the whole parameter along that dimension.
        ranges: the shard's ranges of the whole, in the shard's order. Each process writes one range.
        replicated_rows: how many of the shard's last rows other processes also have.
        kv_replicas: number of processes that have those rows, including this one.
    """

    dim: int
    global_size: int
    ranges: tuple[ShardRange, ...]
    replicated_rows: int = 0
    kv_replicas: int = 1

    def global_shape(self, shape: list[int]) -> list[int]:
        """Return the parameter's shape, from that of a shard or of some of its rows."""
        return [self.global_size if axis == self.dim else size for axis, size in enumerate(shape)]

    def shard_of(self, whole: Tensor) -> Tensor:
        """Return the shard of a whole parameter."""
        return torch.cat([whole.narrow(self.dim, r.start, r.stop - r.start) for r in self.ranges], self.dim)

    def row_weights(self, rows: int) -> Tensor:
        """Return 1 / (number of processes that have the row) for each of the shard's rows, FP32 (rows, 1)."""
        weights = torch.ones(rows, 1)
        weights[rows - self.replicated_rows :] /= self.kv_replicas
        return weights

    def as_distributed(self, part: Tensor, first_row: int, rows: int, replica: tuple[int, int] = (0, 1)) -> UnevenShard:
        """Attach the position in the whole parameter to some rows of a shard.

        Args:
            part: the rows to attach it to.
            first_row: their first row in the shard.
            rows: number of rows in the shard.
            replica: this process's number among those that have the same rows, and how many have them.
        """
        shape = self.global_shape([rows, *part.shape[1:]])
        chunks: list[tuple[Tensor, tuple[int, ...], bool]] = []
        if self.dim != 0:
            chunks = [(part, (first_row, self.ranges[0].start), True)] if len(part) else []
            return UnevenShard.of(part, shape, chunks, replica)
        before = 0
        for range_ in self.ranges:
            start = max(before, first_row)
            before += range_.stop - range_.start
            stop = min(before, first_row + part.shape[0])
            if start < stop:
                row = range_.stop - before + start
                chunks.append((part[start - first_row : stop - first_row], (row, 0), range_.writes))
        return UnevenShard.of(part, shape, chunks, replica)


@dataclass(frozen=True, kw_only=True)
class SharedHeads:
    """Which heads a tensor-parallel process has.

    Args:
        kv_head: the process's key/value head, from 0.
        replica: which of that head's replicas it has, from 0; this also selects its query heads.
        kv_replicas: replicas of each key/value head.
    """

    model: ModelConfig
    kv_head: int
    replica: int
    kv_replicas: int

    @classmethod
    def of(cls, model: ModelConfig, rank: int, tp_ranks: list[int], groups: list[list[int]]) -> SharedHeads:
        """Return the heads of a rank. Raises a ConfigError if the groups do not divide the tensor-parallel group.

        Args:
            rank: rank among all processes.
            tp_ranks: ranks of its tensor-parallel group.
            groups: for all processes, the ranks that share a key/value head.
        """
        groups = [group for group in groups if set(group) <= set(tp_ranks)]
        if len(groups) != model.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads={model.num_kv_heads}, parallel.tensor_parallel_size={len(tp_ranks)}: the "
                "library's groups for key/value heads do not lie within its tensor-parallel groups (it spreads those "
                "of 4 processes over a trn1 node)",
                hint="set parallel.tensor_parallel_size to another multiple of model.num_kv_heads, or to a divisor",
            )
        kv_head = next(number for number, group in enumerate(groups) if rank in group)
        group = groups[kv_head]
        return cls(model=model, kv_head=kv_head, replica=group.index(rank), kv_replicas=len(group))

    def shard_spec(self, name: str) -> ShardSpec | None:
        """Return the spec of a parameter; None if its shards are in the order of the processes' ranks."""
        if name.endswith("attention.qkv.weight"):
            return self._spec_of_qkv()
        if name.endswith("attention.o.weight"):
            columns = self._queries * self.model.head_width
            start = (self.kv_head * self.kv_replicas + self.replica) * columns
            columns_range = ShardRange(start=start, stop=start + columns)
            return ShardSpec(dim=1, global_size=self.model.num_heads * self.model.head_width, ranges=(columns_range,))
        return None

    def _spec_of_qkv(self) -> ShardSpec:
        """Return two ranges, or one for the last replica: its query heads come directly before key and value heads."""
        queries, replicated = self._queries * self.model.head_width, 2 * self.model.head_width
        group = self.kv_replicas * queries + replicated
        start, stop = self.kv_head * group + self.replica * queries, (self.kv_head + 1) * group
        ranges: tuple[ShardRange, ...] = (ShardRange(start=start, stop=stop),)
        if self.replica < self.kv_replicas - 1:
            key_value = ShardRange(start=stop - replicated, stop=stop, writes=False)
            ranges = (ShardRange(start=start, stop=start + queries), key_value)
        return ShardSpec(
            dim=0,
            global_size=self.model.num_kv_heads * group,
            ranges=ranges,
            replicated_rows=replicated,
            kv_replicas=self.kv_replicas,
        )

    @property
    def _queries(self) -> int:
        return self.model.num_heads // (self.model.num_kv_heads * self.kv_replicas)


class UnevenShard(Tensor):
    """A process's shard of a tensor with unequal shards, which DTensor doesn't support.

    It holds the shard, but ``size()`` is the size of the whole tensor. Operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    chunks: list[tuple[Tensor, tuple[int, ...], bool]]
    """The views of the shard, each view's offsets in the whole, and whether this process writes it to checkpoints."""
    replica: tuple[int, int]
    """This process's number among those that have the same shard, and how many have it."""
    _global_shape: torch.Size

    @classmethod
    def of(
        cls,
        part: Tensor,
        shape: list[int],
        chunks: list[tuple[Tensor, tuple[int, ...], bool]],
        replica: tuple[int, int],
    ) -> UnevenShard:
        """Make a shard from this process's part, the whole tensor's shape, and the attributes."""
        shard = part.as_subclass(cls)
        shard._global_shape = torch.Size(shape)
        shard.chunks, shard.replica = chunks, replica
        return shard

    def to_local(self) -> Tensor:
        """Return the shard as a plain tensor."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole tensor."""
        return self._global_shape if dim is None else self._global_shape[dim]
