"""The interface between the loop and a backend. Only the backend that needs an optional package imports it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.model import Llama
from trainer.shard_file import ShardFile
from trainer.shard_index import ShardIndex
from trainer.stopwatch import Stopwatch

#: What a process adds to the signal of a step: it was asked to stop; rank 0 has new orders; rank 0 ends training for an
#: amendment. FP32 adds them exactly for two million processes.
STOP, NEWS, ENDS = 1, 1 << 21, 1 << 22


@dataclass(frozen=True)
class StepMetrics:
    """A step's metrics over all processes.

    Args:
        loss: mean of the whole batch.
        signal: sum of what the processes added to it.
        grad_norm: of the whole model before clipping; counts each parameter once.
        param_norm: of the whole model before the update; counts each parameter once.
        others: further numbers by name, such as ``router_entropy``; ``hlatctl.run.step_metrics`` can describe them.
    """

    loss: float
    signal: float
    grad_norm: float
    param_norm: float
    others: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Sequence[float]) -> StepMetrics:
        """Make metrics from loss, signal and the squares of both norms, summed over all processes."""
        loss, signal, grad_square, param_square = sums
        return cls(loss, signal, math.sqrt(grad_square), math.sqrt(param_square))

    @property
    def stops(self) -> bool:
        """Whether a process was asked to stop."""
        return bool(int(self.signal) % NEWS)

    @property
    def has_news(self) -> bool:
        """Whether rank 0 has new orders."""
        return bool(int(self.signal) & NEWS)

    @property
    def ends(self) -> bool:
        """Whether training ends for an amendment."""
        return bool(int(self.signal) & ENDS)

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Optimizer(Protocol):
    """The part of an optimizer that the loop uses."""

    @property
    def step_count(self) -> int:
        """Updates so far, without skipped ones; may wait for the device."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def replicated_norms(self, axis: str) -> Tensor:
        """Return the L2 norms, FP32, of the parameters that are replicated along a mesh axis, in the same order."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name, as views: ``model.*``, ``exp_avg.*``, ``exp_avg_sq.*``."""

    def loaded(self, step_count: int) -> None:
        """Set the number of updates after a checkpoint has been read into :meth:`tensors`."""


class Backend(Protocol):
    """A device, its processes, and how a step runs on them."""

    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    is_replica_leader: bool
    """This process saves the loader's state for the processes of its replica."""
    data_ranks: list[int]
    """The ranks of this process's replica and node that need tokens, perhaps without this one; the first reads them."""
    compiles: bool
    """The layers are compiled."""
    warnings: list[str]
    """Messages for the journal and the terminal, such as a missing compiler."""

    @property
    def steps_ahead(self) -> int:
        """How many of the newest steps' metrics the loop may leave unread; with 0 it reads them at once."""

    def build_model(self, *, document_end_id: int | None) -> Llama:
        """Return this process's part of the model, on its device, with the initial weights.

        Args:
            document_end_id: attend only within documents, which end with this token; None: attend across documents.
        """

    def optimizer(self, model: Llama) -> Optimizer:
        """Return the optimizer of a model from :meth:`build_model`."""

    def forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradients of this replica's (batch, seq) token ids and next ids, in host memory.

        Returns:
            This process's share of the mean loss of the whole batch; the shares of all processes add up to it.
        """

    def update(
        self, optimizer: Optimizer, loss_share: Tensor, *, lr: float, step: int, signal: int = 0
    ) -> Callable[[], StepMetrics]:
        """Update the parameters with the clipped gradients of the whole batch.

        The loss share is reduced with the gradients. The device may do all this later. An eager device skips an update
        that is not finite.

        Args:
            optimizer: whose gradients are collected.
            loss_share: from :meth:`forward_backward`.
            lr: learning rate.
            step: its number.
            signal: of this process, summed over all processes (``STOP``, ``NEWS``, ``ENDS``).

        Returns:
            A function that returns the step's metrics; it may wait for the device.
        """

    def drift(self, optimizer: Optimizer) -> float:
        """Return the largest relative difference between the norms of a weight's replicas on several processes."""

    def reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place."""

    def stopwatch(self) -> Stopwatch:
        """Return a running stopwatch, by which each process measures the time of its own work."""

    def step_boundary(self) -> None:
        """Mark the end of a step's operations; a lazily executing device starts them here."""

    def from_rank0(self, value: Any) -> Any:
        """Return rank 0's JSON value, on every process."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's JSON value in the order of ranks, on every process."""

    def numbers_on_rank0(self, number: float) -> Tensor | None:
        """Return every process's number (world) in FP32 on rank 0, None on others; for regular use by many ranks."""

    def gather_beside(self, value: Any) -> list[Any]:
        """As :meth:`gather`, for another thread than the training thread; uses a process group of its own."""

    def to_rank0_beside(self, value: Any) -> list[Any]:
        """As :meth:`gather_beside`, but other ranks get an empty list: for values that are large together."""

    def from_rank0_beside(self, value: Any) -> Any:
        """As :meth:`from_rank0`, over the process group of :meth:`gather_beside`."""

    def to_host(self, tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy this process's shards to host memory; the copy is complete when this returns.

        Args:
            tensors: of an optimizer. The copies keep the position of each shard in the whole.
            into: the result of an earlier call, whose memory is reused; empty: allocate memory.
        """

    def for_writing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of an optimizer in a form that another thread can read while training waits."""

    def save(self, tensors: dict[str, Tensor], folder: Path) -> ShardFile | None:
        """Write this process's share of tensors into a folder durably; may run in another thread.

        Args:
            tensors: from :meth:`to_host` or :meth:`for_writing`.
            folder: must exist.

        Returns:
            The file; None if other processes write all that this one has.
        """

    def load(self, tensors: dict[str, Tensor], folder: Path, index: ShardIndex) -> Callable[[], None]:
        """Read tensors of an optimizer from a folder whose shards the index lists; may run in another thread.

        Returns:
            A function for the training thread that puts them in place. On some devices they are already.
        """

    def compile_counters(self) -> dict[str, int]:
        """Return how many graphs of this process came from the cache (``hits``) or not (``misses``); {} if unknown."""

    def peak_flops_per_s(self) -> float | None:
        """Return the device's peak in the precision used for training, or None if unknown."""

    def close(self) -> None:
        """End the process group."""
