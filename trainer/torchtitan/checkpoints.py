"""torchtitan's checkpoints in this project's folders: PyTorch's DCP format, which its own tools read.

The manifest's hashes, the order of commit, verification, retention and copies are those of every checkpoint here
(``trainer.checkpoint``). torchtitan's own manager is not used, so nobody else deletes files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)

from hlatctl.run import files
from trainer.checkpoint import dcp
from trainer.checkpoint.together import Together
from trainer.torchtitan import float8
from trainer.torchtitan.process import Process

if TYPE_CHECKING:
    from trainer.torchtitan.training import Training


class DcpFiles:
    """DCP's files as a :class:`trainer.checkpoint.writer.Storage`.

    Its collectives use a process group of their own, so that they disturb neither training nor ``Together``.
    """

    def __init__(self, process: Process) -> None:
        self._process, pins = process, process.facts.pins_host_memory
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pins,
                use_shared_memory=False,
                use_async_staging=False,  # the next update may follow immediately
                use_non_blocking_copy=pins,
            )
        )

    def shard(self) -> str:
        """Return the name that DCP gives this process's file."""
        return f"__{self._process.rank}_0.distcp"

    def reserve(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Reserve nothing: reading the optimizer's state before its first update would count as an update."""
        return {}

    def to_host(self, tensors: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
        """Copy the states; later calls use the memory of the first one."""
        states = plain(tensors)
        # The stager copies whole storages; torchtitan's views of a fused projection are parts of one.
        own = {name: value.clone() for name, value in states.items() if _is_part(value)}
        return cast(dict[str, Any], self._stager.stage({**states, **own}))

    def for_writing(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the states' tensors and numbers."""
        return plain(tensors)

    def write(self, tensors: dict[str, Any], folder: Path, together: Together) -> list[dict[str, Any]]:
        """Write one file for each process, and DCP's metadata on rank 0."""

        def write() -> dict[str, Any] | None:
            self._use_own_device()
            dcp.save(tensors, folder, process_group=self._process.storage_group)
            path = folder / self.shard()
            return files.describe(folder, path) if path.exists() else None

        return [entry for entry in together.everywhere(write) if entry]

    def _use_own_device(self) -> None:
        """Make this process's device the calling thread's: a new thread has the first one, whose copies DCP awaits."""
        device = self._process.device
        if self._process.facts.own_for_each_process:
            torch.get_device_module(device).set_device(device.index)

    def finish(self, folder: Path) -> list[str]:
        """Return the name of DCP's metadata, which is written."""
        return [dcp.METADATA]

    def read(self, tensors: dict[str, Any], folder: Path, together: Together) -> None:
        """Read the states in place, into any layout; see ``trainer.checkpoint.dcp.load``."""

        def read() -> None:
            self._use_own_device()
            with torch.no_grad():
                dcp.load(tensors, folder, process_group=self._process.storage_group)

        together.everywhere(read)

    def weights(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the model's weights."""
        return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def _is_part(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return states with their own dictionaries instead of the objects that have them."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in states.items()}


class _Weights(ModelWrapper):
    """The weights of a model, also where FSDP gathers them in FP8."""

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: float8.plain(value) for name, value in super()._get_state_dict().items()}


class Checkpoints(BaseCheckpointManager):
    """What torchtitan's loop calls instead of its own manager."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings of checkpoints, which have no effect, and who saves."""

        enable: bool = True
        _training: Training | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        assert config._training is not None
        self.enable, self.save_future, self._training = True, None, config._training
        self._model = _Weights(model_parts)
        self._states = {**states, OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}

    @property
    def states(self) -> dict[str, Any]:
        """All states under torchtitan's names: the weights by their own, the others by their objects'."""
        return {**self._states, **self._model.state_dict()}

    def put(self, states: dict[str, Any]) -> None:
        """Hand weights that were read to the model; the others have taken theirs."""
        self._model.load_state_dict({name: value for name, value in states.items() if name not in self._states})

    def _load(self, step: int = -1) -> bool:
        return self._training.begin(self)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._training.after_step(curr_step, self)

    def _maybe_wait_for_staging(self) -> None:
        self._training.before_update()

    def _wait_for_saving(self) -> None:
        pass  # the manager's writer waits

    def _close(self) -> None:
        pass
