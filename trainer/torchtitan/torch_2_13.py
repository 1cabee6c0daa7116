"""What torchtitan 0.3 calls of PyTorch 2.14, for PyTorch 2.13. Unused, and to be deleted, once 2.14 is the oldest."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

#: torchtitan's types of sharded tensors; the newer ones need functions of PyTorch 2.14.
SPMD_BACKEND = "spmd_types" if torch.__version__ >= "2.14" else "partial_dtensor"


def add_timeouts() -> None:
    """Add the function that sets the timeout of a process group."""
    if not hasattr(dist, "set_timeout"):
        setattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # noqa: B010 (unknown to its types)


def take_micro_batches(schedule: Any) -> None:
    """Let the step of a pipeline's schedule take micro-batches; before PyTorch 2.14 it divides a batch itself."""
    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        schedule.step = partial(_step, schedule)


def _step(
    schedule: Any,
    *,
    arg_mbs: list[Any] | None = None,
    kwarg_mbs: list[Any] | None = None,
    target_mbs: list[Any] | None = None,
    losses: list[Any] | None = None,
    return_outputs: bool = False,
    loss_kwargs: dict[str, Any] | None = None,
) -> None:
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
