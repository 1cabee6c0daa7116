"""Whole matrices on the processes that orthogonalize them, and the results back on all that need them.

The processes divide the matrices among themselves, so that each is orthogonalized once, as in Moonlight's distributed
Muon (arXiv 2502.16982, section 2.3). This is done in rounds of at most one matrix per process: a process gathers its
matrix from the processes that have other pieces of it, and sends back theirs. Then replicas exchange their results.
A process has one whole matrix at a time, and the results of a round, in BF16. Matrices of similar size share a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hlatctl.run import peers
from trainer.matrices import Matrix


class Pieces:
    """The processes that have pieces of the same matrices, and those that have replicas of a piece.

    Args:
        mesh: of the processes that have the matrices; None: this process has all of them.
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
        #: Slice and shard of each process, in the order of the group, which is that of all ranks.
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
        """Which shard of its slice this process has."""
        return self.places[self.rank][1]

    def sizes(self, matrix: Matrix) -> list[int]:
        """Return the elements of a matrix that each process of the group has."""
        return [math.prod(matrix.piece_shape(shard)) for _, shard in self.places]


class MatrixExchange:
    """Divides matrices among the processes.

    Args:
        matrices: all that the processes have together, in the same order on each.
        pieces: the processes.
    """

    def __init__(self, matrices: Sequence[Matrix], pieces: Pieces) -> None:
        self._pieces = pieces
        by_size = sorted(matrices, key=lambda matrix: -math.prod(matrix.shape))
        members, each = len(pieces.places), len(pieces.places) * pieces.replicas
        #: Of each round, the matrices by replica and by process of the group.
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
            orthogonalize: a whole matrix.
        """
        for matrices in self._rounds:
            mine = self._pieces.replica
            results = self._exchange(matrices[mine], self._take_round(matrices, take), orthogonalize)
            for some, values in zip(matrices, self._of_replicas(matrices, results), strict=True):
                sizes = [self._size(matrix) for matrix in some]
                for matrix, value in zip(some, torch.split(values[: sum(sizes)], sizes), strict=True):
                    yield matrix, value.view(matrix.piece_shape(self._pieces.shard))

    def _take_round(self, matrices: Sequence[Sequence[Matrix]], take: Callable[[Matrix], Tensor]) -> list[Tensor]:
        """Take all pieces of a round, and return those of this replica's matrices, or an empty one if it has none."""
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
        """Assemble the pieces of the group's processes, and return those of the orthogonalized matrix."""
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
