"""What the loop asks of a backend. An optional package is imported inside the backend that needs it, never here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.model import Llama
from trainer.optim import AdamW


class Backend(Protocol):
    """A device, its processes, and how a step runs on them."""

    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    speaks_for_replica: bool
    """Of the processes that have one replica together, this is the one that writes down what all of them know."""
    compiles: bool
    """The layers are compiled."""
    warnings: list[str]
    """What a person should know, such as a compiler that is missing; the loop journals it."""

    def build_model(self, *, document_end_id: int | None) -> Llama:
        """This process's part of the model, on its device, with the initial weights.

        Args:
            document_end_id: attend only within documents, which end with this token; none: across them.
        """

    def optimizer(self, model: Llama) -> AdamW:
        """The optimizer of what :meth:`build_model` gave."""

    def accumulate(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of this replica's (batch, seq) token ids and next ids to those that are there.

        Returns:
            This process's share of the mean loss of the whole batch: summed over all processes it is that.
        """

    def reduce_gradients(self, optimizer: AdamW) -> None:
        """Bring the gradients of the whole batch into ``optimizer.gradients``."""

    def drift(self, optimizer: AdamW) -> float:
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
