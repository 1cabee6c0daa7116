"""Muon for the matrices of layers, and AdamW for embedding, head and norms.

Muon moves a matrix by the orthogonalized average of its gradients (kellerjordan.github.io/posts/muon). A move is as
large as AdamW's, so both use one learning rate and decay (Moonlight, arXiv 2502.16982, section 2.2). The result equals
``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` for the matrix of each linear map, regardless of how parameters
pack matrices and how processes divide them.

``Matrix``: a parameter can pack the matrices of several maps: query, key and value, or gate and up. Their rows
alternate with a fixed period. A matrix is divided like its parameter: over ``tp`` by rows or by columns, and with FSDP
each slice's rows over ``dp``.

``MatrixExchange``: the processes divide the matrices among themselves, so that each is orthogonalized once, as in
Moonlight's distributed Muon (arXiv 2502.16982, section 2.3). In each round a process gathers at most one matrix from
the processes that have other pieces of it, and sends their pieces back. Then replicas exchange their results. So a
process holds one whole matrix and the results of one round, in BF16. Matrices of similar size share a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conf.parametrization import rate_factor
from conf.schema import Config, ModelConfig, OptimizerConfig
from hlatctl.run import peers
from trainer.model.decoder import mlp_blocks
from trainer.optim.adamw import AdamW, ParameterShard, rounded_stochastically


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The matrix of one linear map, divided into slices, and each slice into shards of its rows.

    Args:
        start: first row of the map in each period of the parameter's rows.
        stop: end of its rows in each period.
        period: rows of the parameter after which the maps repeat.
        slice_rows: rows of a slice of the parameter.
        slice_columns: columns of a slice.
        slices: number of slices, one per process.
        slice_dim: the dimension that is divided into slices.
        shards: number of processes that share a slice's rows, divided as by FSDP.
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
        """Return the rows of a parameter's slice that a shard has: equal blocks, of which the last may be shorter."""
        size = -(-self.slice_rows // self.shards)
        first = min(shard * size, self.slice_rows)
        return range(first, min(first + size, self.slice_rows))

    def piece_shape(self, shard: int) -> tuple[int, int]:
        """Return rows and columns of the matrix's part in a shard; it is the same for all slices."""
        rows = self.shard_rows(shard)
        return self._rows_before(rows.stop) - self._rows_before(rows.start), self.slice_columns

    def rows_in(self, shard: int) -> Tensor | None:
        """Return which rows of a shard belong to the matrix (rows); None: all."""
        if self.period == self.stop - self.start:
            return None
        rows = self.shard_rows(shard)
        place = torch.arange(rows.start, rows.stop) % self.period
        return torch.nonzero((place >= self.start) & (place < self.stop)).flatten()

    def assemble(self, pieces: list[list[Tensor]]) -> Tensor:
        """Return the whole matrix from the pieces of each slice's shards."""
        return torch.cat([torch.cat(shards) for shards in pieces], self.slice_dim)

    def divide(self, whole: Tensor) -> list[list[Tensor]]:
        """Return the pieces of each slice's shards, as views of the whole matrix."""
        sizes = [self.piece_shape(shard)[0] for shard in range(self.shards)]
        return [list(torch.split(part, sizes)) for part in torch.chunk(whole, self.slices, self.slice_dim)]

    def _rows_before(self, row: int) -> int:
        """Return how many of a slice's first rows belong to the matrix."""
        periods, rest = divmod(row, self.period)
        return periods * (self.stop - self.start) + min(max(rest - self.start, 0), self.stop - self.start)


def packed_rows(name: str, model: ModelConfig) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and period of the rows of each linear map in a layer's parameter; nothing for others."""
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


class Pieces:
    """The processes that have pieces of the same matrices, and those that have replicas of a piece.

    Args:
        mesh: mesh of the processes that have the matrices; None: this process has all of them.
        sharded: slices of the matrices are sharded over ``dp``.
    """

    def __init__(self, mesh: DeviceMesh | None, *, sharded: bool) -> None:
        self.group: dist.ProcessGroup | None = None
        self.replica_group: dist.ProcessGroup | None = None
        self.places, self.slices, self.shards, self.rank, self.replica, self.replicas = [(0, 0)], 1, 1, 0, 0, 1
        if mesh is None:
            return
        axes = ("tp", "dp") if sharded else ("tp",)
        ranks = mesh[axes].mesh.view(mesh["tp"].size(), -1)
        self.slices, self.shards = ranks.shape
        #: Slice and shard of each process, in the order of the group, which is the order of ranks.
        self.places = sorted(
            ((t, d) for t in range(self.slices) for d in range(self.shards)), key=lambda at: int(ranks[at])
        )
        self.rank = self.places.index((mesh.get_local_rank("tp"), mesh.get_local_rank("dp") if sharded else 0))
        if self.slices > 1 and self.shards > 1:
            with peers.connecting(dist.get_backend()):
                self.group = dist.new_group(ranks.flatten().tolist(), use_local_synchronization=True)
        elif len(self.places) > 1:
            self.group = mesh["tp" if self.slices > 1 else "dp"].get_group()
        for axis in mesh.mesh_dim_names or ():
            if axis not in axes and mesh[axis].size() > 1:
                self.replica_group = mesh[axis].get_group()
                self.replica, self.replicas = mesh.get_local_rank(axis), mesh[axis].size()

    @property
    def shard(self) -> int:
        """The number of this process's shard in its slice."""
        return self.places[self.rank][1]

    def sizes(self, matrix: Matrix) -> list[int]:
        """Return how many elements of a matrix each process of the group has."""
        return [math.prod(matrix.piece_shape(shard)) for _, shard in self.places]


class MatrixExchange:
    """Divides matrices among the processes.

    Args:
        matrices: the matrices of all processes together, in the same order on each.
        pieces: the processes that have the pieces.
    """

    def __init__(self, matrices: Sequence[Matrix], pieces: Pieces) -> None:
        self._pieces = pieces
        by_size = sorted(matrices, key=lambda matrix: -math.prod(matrix.shape))
        members, each = len(pieces.places), len(pieces.places) * pieces.replicas
        #: For each round, the matrices by replica and by process of the group.
        self._rounds = [
            [by_size[first : first + members] for first in range(start, start + each, members)]
            for start in range(0, len(by_size), each)
        ]

    def run(
        self, take: Callable[[Matrix], Tensor], orthogonalize: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Matrix, Tensor]]:
        """Yield each matrix with this process's piece of the orthogonalized whole, BF16 (rows, columns).

        Args:
            take: returns this process's piece of a matrix, BF16 (rows, columns); called once for each matrix.
            orthogonalize: returns the orthogonalized whole matrix.
        """
        for matrices in self._rounds:
            mine = self._pieces.replica
            results = self._exchange(matrices[mine], self._take_round(matrices, take), orthogonalize)
            for some, values in zip(matrices, self._of_replicas(matrices, results), strict=True):
                sizes = [self._size(matrix) for matrix in some]
                for matrix, value in zip(some, torch.split(values[: sum(sizes)], sizes), strict=True):
                    yield matrix, value.view(matrix.piece_shape(self._pieces.shard))

    def _take_round(self, matrices: Sequence[Sequence[Matrix]], take: Callable[[Matrix], Tensor]) -> list[Tensor]:
        """Take all pieces of a round; return those of this replica's matrices, or an empty one if it has none."""
        mine: list[Tensor] = []
        for replica, some in enumerate(matrices):
            for matrix in some:
                piece = take(matrix)
                if replica == self._pieces.replica:
                    mine.append(piece)
        return mine or [piece.new_empty(0)]

    def _size(self, matrix: Matrix) -> int:
        return math.prod(matrix.piece_shape(self._pieces.shard))

    def _exchange(
        self, matrices: Sequence[Matrix], taken: Sequence[Tensor], orthogonalize: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return this process's pieces of its replica's orthogonalized matrices, one after another."""
        pieces = self._pieces
        if not matrices:
            return taken[0]
        if pieces.group is None:
            return orthogonalize(taken[0]).flatten()
        flat = torch.cat([piece.flatten() for piece in taken])
        own = matrices[pieces.rank] if pieces.rank < len(matrices) else None
        theirs = pieces.sizes(own) if own else [0] * len(pieces.places)
        ours = [self._size(matrix) for matrix in matrices] + [0] * (len(pieces.places) - len(matrices))
        received = flat.new_empty(sum(theirs))
        dist.all_to_all_single(received, flat, theirs, ours, group=pieces.group)
        back = self._orthogonalized(own, torch.split(received, theirs), orthogonalize) if own else received
        results = torch.empty_like(flat)
        dist.all_to_all_single(results, back, ours, theirs, group=pieces.group)
        return results

    def _orthogonalized(
        self, matrix: Matrix, received: Sequence[Tensor], orthogonalize: Callable[[Tensor], Tensor]
    ) -> Tensor:
        places = self._pieces.places
        ranks = {place: rank for rank, place in enumerate(places)}
        parts = [[received[ranks[t, d]] for d in range(matrix.shards)] for t in range(matrix.slices)]
        shaped = [[part.view(matrix.piece_shape(d)) for d, part in enumerate(shards)] for shards in parts]
        divided = matrix.divide(orthogonalize(matrix.assemble(shaped)))
        return torch.cat([divided[t][d].flatten() for t, d in places])

    def _of_replicas(self, matrices: Sequence[Sequence[Matrix]], mine: Tensor) -> Sequence[Tensor]:
        """Return the results of all replicas, by replica, each perhaps followed by padding."""
        pieces = self._pieces
        if pieces.replica_group is None:
            return [mine]
        longest = max(sum(self._size(matrix) for matrix in some) for some in matrices)
        padded = mine.new_zeros(longest)
        padded[: len(mine)] = mine
        rows = mine.new_empty(pieces.replicas, longest)
        dist.all_gather(list(rows), padded, group=pieces.replica_group)
        return list(rows)


#: Coefficients of the quintic iteration: they increase small singular values quickly (Keller Jordan, see above).
_A, _B, _C = 3.4445, -4.7750, 2.0315
#: Smallest norm that a matrix is divided by.
_EPS = 1e-7
#: The usual root mean square of AdamW's updates (arXiv 2502.16982, section 2.2).
_ADAMW_RMS = 0.2


class Muon(AdamW):
    """Muon with AdamW. A matrix's only moment is the average of its gradients, ``exp_avg``.

    Args:
        shards: the shards, on their device, by the parameter's name.
        config: momentum and iterations of Muon, and AdamW's constants.
        model: the model's shape, which defines the matrices that parameters pack.
        options: further arguments of :class:`trainer.optim.adamw.AdamW`.
    """

    def __init__(
        self, shards: Mapping[str, ParameterShard], config: OptimizerConfig, *, model: ModelConfig, **options: Any
    ) -> None:
        pieces = _pieces_of(shards)
        matrices = [matrix for name in sorted(shards) for matrix in _matrices_of(name, shards[name], pieces, model)]
        super().__init__(shards, config, model=model, others={matrix.parameter for matrix in matrices}, **options)
        #: The factor of the learning rate of each parameter that packs matrices.
        self._rates = {m.parameter: rate_factor(m.parameter, model, orthogonalized=True) for m in matrices}
        self._exchange = MatrixExchange(matrices, pieces)
        #: Each matrix's number, and its rows in this process's shard of the parameter.
        self._numbers = {matrix: number for number, matrix in enumerate(matrices, 1)}
        #: The current step's number, divisor of gradients, and whether it changes nothing.
        self._number = 0
        self._divisor: Tensor | None = None
        self._skips: Tensor | None = None
        device = self.gradients.device
        self._rows = {matrix: _on(matrix.rows_in(pieces.shard), device) for matrix in matrices}

    @classmethod
    def of(cls, shards: Mapping[str, ParameterShard], config: Config, **options: Any) -> Self:
        """See :meth:`trainer.optim.adamw.AdamW.of`."""
        return cls(shards, config.optimizer, model=config.model, **options)

    def step(self, *, lr: float, number: int, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update as :class:`trainer.optim.adamw.AdamW`. Matrices come first, because AdamW may divide all gradients."""
        self._number, self._divisor, self._skips = number, divisor, None if skip is None else skip.bool()
        for matrix, update in self._exchange.run(self._direction, self._orthogonalized):
            self._move(matrix, update, lr)
        super().step(lr=lr, number=number, divisor=divisor, skip=skip)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Add the gradient to the average, and return this process's piece of the direction, BF16 (rows, columns)."""
        gradient = self._of(matrix, self._gradients)
        if self._divisor is not None:
            gradient = gradient / self._divisor
        average = self._of(matrix, self._moments["exp_avg"]).float().lerp(gradient, 1.0 - self._config.momentum)
        direction = gradient.lerp(average, self._config.momentum) if self._config.nesterov else average
        self._put(matrix, self._moments["exp_avg"], average)
        return direction.bfloat16()

    def _orthogonalized(self, whole: Tensor) -> Tensor:
        return orthogonalize(whole, self._config.newton_schulz_steps)

    def _move(self, matrix: Matrix, update: Tensor, lr: float) -> None:
        scale = _ADAMW_RMS * math.sqrt(max(matrix.shape)) * self._rates[matrix.parameter]
        kept = self._of(matrix, self._values).float() * (1.0 - lr * self._decay_of(matrix.parameter))
        self._put(matrix, self._values, kept - update.float() * (lr * scale))

    def _of(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor, rows = tensors[matrix.parameter], self._rows[matrix]
        return tensor if rows is None else tensor.index_select(0, rows)

    def _put(self, matrix: Matrix, tensors: Mapping[str, Tensor], exact: Tensor) -> None:
        """Write FP32 values, rounded to the precision of the tensor, unless the step is skipped."""
        tensor, rows = tensors[matrix.parameter], self._rows[matrix]
        if self._skips is not None:
            exact = torch.where(self._skips, self._of(matrix, tensors).float(), exact)
        if self._stochastic:
            generator = self._noise(matrix, is_average=tensors is not self._values)
            noise = torch.randint(1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
            exact = rounded_stochastically(exact, noise)
        if rows is None:
            tensor.copy_(exact)
        else:
            tensor.index_copy_(0, rows, exact.to(tensor.dtype))

    def _noise(self, matrix: Matrix, *, is_average: bool) -> torch.Generator:
        """Return the noise of one matrix, which doesn't depend on the order of matrices."""
        step = self._seed * 1_000_003 + self._number
        number = 2 * self._numbers[matrix] + is_average
        return torch.Generator(self.gradients.device).manual_seed((step * 1_000_003 + number) % 2**64)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return the approximately nearest matrix with orthonormal rows or columns, BF16, by Newton-Schulz iterations.

    Its singular values are between about 0.5 and 1.5 rather than exactly 1. Training is as good (Keller Jordan, see
    above).

    Args:
        matrix: BF16 (rows, columns); with all zeros the result is 0.
        steps: number of iterations.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if is_tall else matrix
    result = result / result.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), result, beta=_A)
    return result.T if is_tall else result


def _pieces_of(shards: Mapping[str, ParameterShard]) -> Pieces:
    first = next(iter(shards.values()))
    return Pieces(first.mesh, sharded=first.sharded)


def _matrices_of(name: str, shard: ParameterShard, pieces: Pieces, model: ModelConfig) -> list[Matrix]:
    rows, *columns = shard.parameter.shape
    return [
        Matrix(
            parameter=name,
            start=start,
            stop=stop,
            period=period,
            slice_rows=rows,
            slice_columns=columns[0],
            slices=pieces.slices,
            slice_dim=shard.slice_dim or 0,
            shards=pieces.shards,
        )
        for start, stop, period in packed_rows(name, model)
    ]


def _on(rows: Tensor | None, device: torch.device) -> Tensor | None:
    return None if rows is None else rows.to(device)
