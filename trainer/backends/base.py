"""What the loop asks of a backend. An optional package is imported inside the backend that needs it, never here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.model import Llama


@dataclass(frozen=True)
class StepMetrics:
    """What a step's processes know together.

    Args:
        loss: mean of the whole batch.
        stops: how many processes were asked to stop.
        grad_norm: of the whole model's gradients, before they are clipped, each parameter counted once.
        param_norm: that of the parameters that the step began with.
    """

    loss: float
    stops: float
    grad_norm: float
    param_norm: float

    @classmethod
    def of(cls, sums: Sequence[float]) -> StepMetrics:
        """From loss, stops and the squares of the two norms, summed over all processes."""
        loss, stops, grad_square, param_square = sums
        return cls(loss, stops, math.sqrt(grad_square), math.sqrt(param_square))

    @property
    def finite(self) -> bool:
        """Loss and gradients are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Optimizer(Protocol):
    """What the loop asks of an optimizer; the rest is between it and its backend."""

    step_count: int
    """Updates done."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def norms_of_copies(self, axis: str) -> Tensor:
        """L2 norms, FP32, of the parameters that the processes along an axis hold copies of, in one order on all."""

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name, as views: ``model.*``, ``exp_avg.*``, ``exp_avg_sq.*``."""

    def loaded(self, step_count: int) -> None:
        """A checkpoint has been read into :meth:`tensors`."""


class Backend(Protocol):
    """A device, its processes, and how a step runs on them."""

    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    speaks_for_replica: bool
    """Of the processes that have one replica together, this is the one that writes down what all of them know."""
    steps_ahead: int
    """How many steps the loop may have asked for and not seen the sums of; with 0 it sees them at once."""
    compiles: bool
    """The layers are compiled."""
    warnings: list[str]
    """What a person should know, such as a compiler that is missing; the loop journals it."""

    def build_model(self, *, document_end_id: int | None) -> Llama:
        """This process's part of the model, on its device, with the initial weights.

        Args:
            document_end_id: attend only within documents, which end with this token; none: across them.
        """

    def optimizer(self, model: Llama) -> Optimizer:
        """The optimizer of what :meth:`build_model` gave."""

    def forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of this replica's (batch, seq) token ids and next ids, in host memory, to what is there.

        Returns:
            This process's share of the mean loss of the whole batch: summed over all processes it is that.
        """

    def update(
        self, optimizer: Optimizer, loss_share: Tensor, *, lr: float, asked_to_stop: bool
    ) -> Callable[[], StepMetrics]:
        """Update the parameters with the gradients of the whole batch, clipped.

        The loss that :meth:`forward_backward` returned is reduced with them. A lazily executing device does it later.
        Where loss and gradients are known before, an update that is not finite is not made.

        Returns:
            What gives the step's sums, waiting for the device if it must.
        """

    def drift(self, optimizer: Optimizer) -> float:
        """Largest difference between copies of a weight on several processes: of their norms, as a share of a norm."""

    def reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place."""

    def wait(self) -> None:
        """Until the device has done what was asked of it, so that the clock tells whose work took how long."""

    def step_boundary(self) -> None:
        """One optimizer step has been asked for; a lazily executing device starts it here."""

    def from_rank0(self, value: Any) -> Any:
        """Rank 0's JSON value, on every process."""

    def gather(self, value: Any) -> list[Any]:
        """Every process's JSON value in order of rank, on every process."""

    def gather_beside(self, value: Any) -> list[Any]:
        """As :meth:`gather`, for a thread beside the one that trains, with a process group of its own."""

    def to_host(self, tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this process's parts in host memory, whole when this returns.

        Args:
            tensors: what an optimizer holds; they keep the description of how they are cut.
            into: what an earlier call gave, to be used again; empty: new memory.
        """

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Write tensors into a folder, each process its part, durably; beside training as :meth:`gather_beside`."""

    def load(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Read tensors in place from a folder that :meth:`save` wrote."""

    def compile_counters(self) -> dict[str, int]:
        """Compiled graphs that came from the cache (``hits``) or not (``misses``) in this process; empty if unknown."""

    def peak_flops_per_s(self) -> float | None:
        """The device's peak in the precision trained in, or None where it isn't known."""

    def close(self) -> None:
        """End the process group."""
