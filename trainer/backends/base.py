"""What the loop asks of a backend. An optional package is imported inside the backend that needs it, never here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conf.schema import OptimizerConfig
from trainer.optim import FlatAdamW

#: Token ids (batch, seq) and next ids (batch, seq) to the mean loss.
LossFunction = Callable[[Tensor, Tensor], Tensor]


class Backend(Protocol):
    """A device, its processes, and how a step runs on them."""

    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    compiles: bool
    """The loss function is compiled."""
    warnings: list[str]
    """What a person should know, such as a compiler that is missing; the loop journals it."""

    def parallelize(self, model: nn.Module) -> None:
        """Bring a model to its device, cut or copied as the configuration says."""

    def loss_function(self, model: nn.Module) -> LossFunction:
        """The model's loss, compiled if asked for."""

    def optimizer(self, model: nn.Module, config: OptimizerConfig, *, extra: int) -> FlatAdamW:
        """The optimizer of a parallelized model; ``extra`` numbers are reduced with its gradients."""

    def reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place."""

    def step_boundary(self) -> None:
        """One optimizer step has been asked for; a lazily executing device starts it here."""

    def from_rank0(self, value: Any) -> Any:
        """Rank 0's JSON value, on every process."""

    def gather(self, value: Any) -> list[Any]:
        """Every process's JSON value in order of rank, on every process."""

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Write tensors into a folder, each process its part, durably."""

    def load(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Read tensors in place from a folder that :meth:`save` wrote."""

    def compile_counters(self) -> dict[str, int]:
        """Compiled graphs that came from the cache (``hits``) or did not (``misses``) in this process."""

    def peak_flops_per_s(self) -> float | None:
        """The device's peak in the precision trained in, or None where it isn't known."""

    def close(self) -> None:
        """End the process group."""
