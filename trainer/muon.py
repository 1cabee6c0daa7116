"""Muon for the matrices of layers, and AdamW for embedding, head and norms.

Muon moves a matrix by the orthogonalized average of its gradients (kellerjordan.github.io/posts/muon). A move is as
large as AdamW's, so both use one learning rate and decay (Moonlight, arXiv 2502.16982, section 2.2). The result is that
of ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` for the matrix of each linear map, regardless of how parameters
pack matrices and how processes divide them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conf.schema import ModelConfig, OptimizerConfig
from trainer.matrices import Matrix, packed_rows
from trainer.matrix_exchange import MatrixExchange, Pieces
from trainer.optim import AdamW, ParameterShard
from trainer.rounding import stochastic_round_

#: Of the quintic iteration: they increase small singular values quickly (Keller Jordan, see above).
_A, _B, _C = 3.4445, -4.7750, 2.0315
#: Smallest norm that a matrix is divided by.
_EPS = 1e-7
#: The usual root mean square of AdamW's updates (arXiv 2502.16982, section 2.2).
_ADAMW_RMS = 0.2


class Muon(AdamW):
    """The optimizer. A matrix's only moment is the average of its gradients, ``exp_avg``.

    Args:
        shards: by the parameter's name, on their device.
        config: momentum and iterations of Muon, and AdamW's constants.
        model: the shape, which defines the matrices that parameters pack.
        options: of :class:`trainer.optim.AdamW`.
    """

    def __init__(
        self, shards: Mapping[str, ParameterShard], config: OptimizerConfig, *, model: ModelConfig, **options: Any
    ) -> None:
        pieces = _pieces_of(shards)
        matrices = [matrix for name in sorted(shards) for matrix in _matrices_of(name, shards[name], pieces, model)]
        super().__init__(shards, config, others={matrix.parameter for matrix in matrices}, **options)
        self._exchange = MatrixExchange(matrices, pieces)
        #: Each matrix's number, and its rows of this process's shard of the parameter.
        self._numbers = {matrix: number for number, matrix in enumerate(matrices, 1)}
        #: The current step's number, divisor of gradients, and whether it changes nothing.
        self._number = 0
        self._divisor: Tensor | None = None
        self._skips: Tensor | None = None
        device = self.gradients.device
        self._rows = {matrix: _on(matrix.rows_in(pieces.shard), device) for matrix in matrices}

    def step(self, *, lr: float, number: int, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """See :class:`trainer.optim.AdamW`. Matrices are first, because AdamW may divide all gradients."""
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
        """Move this process's piece of a matrix against the orthogonalized direction."""
        scale = _ADAMW_RMS * math.sqrt(max(matrix.shape))
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
            rounded = torch.empty_like(exact, dtype=tensor.dtype)
            stochastic_round_(rounded, exact, self._noise(matrix, is_average=tensors is not self._values))
            exact = rounded
        if rows is None:
            tensor.copy_(exact)
        else:
            tensor.index_copy_(0, rows, exact.to(tensor.dtype))

    def _noise(self, matrix: Matrix, *, is_average: bool) -> torch.Generator:
        """Return the noise of one matrix, so that it doesn't depend on the order of matrices."""
        step = self._seed * 1_000_003 + self._number
        number = 2 * self._numbers[matrix] + is_average
        return torch.Generator(self._noise_device).manual_seed((step * 1_000_003 + number) % 2**64)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return about the nearest matrix with orthonormal rows or columns, BF16, by Newton-Schulz iterations.

    Its singular values are between about 0.5 and 1.5 rather than exactly 1. Training is as good (Keller Jordan, see
    above).

    Args:
        matrix: BF16 (rows, columns); with all zeros the result is 0.
        steps: iterations.
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
