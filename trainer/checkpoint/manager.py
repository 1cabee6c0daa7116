"""Checkpoints: copied to host memory while training waits, written beside it, committed whole or not at all.

A checkpoint is a folder: safetensors shards (through the backend), ``state.json`` (what all ranks share),
``rank-00000.json`` (what each has for itself), ``model.json`` (the shape) and ``manifest.json`` last. It is made under
a temporary name and renamed. There is no pickle in it, and none is ever loaded. ``trainer.checkpoint.tiers`` says where
it lies, ``trainer.checkpoint.trust`` what becomes of it later.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.initial_weights import check_initial_weights
from conf.schema import Config
from conf.sizes import checkpoint_bytes
from hlatctl.run import files
from hlatctl.run.errors import DISK_FULL, HlatctlError, StorageError, from_record
from hlatctl.run.journal import JournalWriter
from hlatctl.run.manifest import read_manifest
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import reading
from trainer.backends.base import Backend
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.trust import CheckpointRecords
from trainer.checkpoint.writer import RANKS, STATE, Save, Writer, rank_file

#: What the names of the weights begin with, among all tensors of a checkpoint.
WEIGHTS = "model."
#: A save also leaves this much free, for the journal.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gave back besides the tensors.

    Args:
        step: it was taken after.
        shared: of all ranks.
        ranks: what each of the ranks that wrote it had for itself; there may be more or fewer of them now.
    """

    step: int
    shared: dict[str, Any]
    ranks: list[dict[str, Any]]


class CheckpointManager:
    """Writes, restores and removes the checkpoints of a run.

    All ranks call the methods together, from the training thread.

    Args:
        config: of the run.
        run: its directory.
        backend: moves the tensors.
        journal: rank 0's, else None.
    """

    def __init__(self, config: Config, run: RunPaths, backend: Backend, journal: JournalWriter | None) -> None:
        self._config, self._run, self._backend = config, run, backend
        self._tiers = Tiers(config, run)
        self._records = CheckpointRecords(config, run, self._tiers, journal)
        self._host: dict[str, Tensor] = {}
        self._writer = Writer(config, backend, self._tiers, self._records)

    def save(
        self,
        tensors: dict[str, Tensor],
        *,
        step: int,
        tokens: int,
        reason: str,
        shared: dict[str, Any],
        own: dict[str, Any],
    ) -> None:
        """Take a checkpoint; when this returns the tensors may change.

        It is written beside training, except that ``final`` and ``stop`` (or ``checkpoint.mode=sync``) are waited for.
        One that is not required is left out where the disk is full, or the one before is still being written and
        ``checkpoint.when_busy=skip``; the journal says so.

        Raises:
            StorageError: too little space for a required one, or the storage failed, for this one or the one before;
                earlier checkpoints are as they were.
        """
        started_s = time.monotonic()
        save = Save(step=step, tokens=tokens, reason=reason, shared=shared, own=own, started_s=started_s)
        if not self._on_rank0(lambda: self._may_begin(save)):
            return
        self._writer.join()
        if self._config.checkpoint.mode == "sync":
            self._writer.write_now(tensors, save)
            self._on_rank0(self._writer.raise_failure)
        else:
            self._host = self._backend.to_host(tensors, self._host)
            stall_s = time.monotonic() - started_s
            self._writer.start(self._host, save, stall_s=stall_s)
        if reason in ("final", "stop"):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            StorageError: what was being written failed.
        """
        self._writer.join()
        self._on_rank0(self._writer.raise_failure)

    def close(self) -> None:
        """As :meth:`wait`, where training has failed already; what else failed is in the journal."""
        self._writer.join()

    def healthy_step(self) -> None:
        """A step was finite: the checkpoints before it have survived one more."""
        self._records.healthy_step()

    def restore(self, tensors: dict[str, Tensor], max_step: int | None = None) -> Restored | None:
        """Read the newest valid checkpoint, up to a step, into the tensors; None if none was ever written.

        Raises:
            CheckpointError: some were written and none is valid.
        """
        chosen = self._on_rank0(lambda: self._records.choose(max_step))
        if self._config.checkpoint.mode == "async":
            # Now, so that too little memory shows before anything is trained and the first save finds it mapped.
            self._host = self._backend.to_host(tensors, self._host)
        if chosen is None:
            return None
        step, folder = int(chosen[0]), Path(chosen[1])
        self._backend.load(tensors, folder)
        with reading(folder):
            ranks = [files.read_json(folder / rank_file(rank)) for rank in range(read_manifest(folder).world[RANKS])]
            return Restored(step=step, shared=files.read_json(folder / STATE), ranks=ranks)

    def begin_from(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Read the weights, and nothing else, of another run's checkpoint or of an imported model into the tensors.

        Raises:
            ConfigError: they are another model's.
            CheckpointError: they are not what was written.
        """
        self._on_rank0(lambda: check_initial_weights(self._config, checksums=True))
        weights = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
        self._backend.load(weights, folder)
        self._records.note("initial_weights", path=os.fspath(folder))

    def _on_rank0(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0 alone; its value, or its error, is every rank's, so that none waits for another."""
        result, failure = None, None
        if self._backend.rank == 0:
            try:
                result = work()
            except (HlatctlError, OSError) as error:
                failure = self._writer.failure_of(error)
        result, failure = self._backend.from_rank0([result, failure])
        if failure:
            raise from_record(failure)
        return result

    def _may_begin(self, save: Save) -> bool:
        """Whether a save goes ahead now: the one before is written, and there is room."""
        if self._writer.is_busy and not save.required and self._config.checkpoint.when_busy == "skip":
            self._writer.leave_out(save, "the checkpoint before is still being written")
            return False
        self._writer.join()
        self._writer.raise_failure()
        needed = checkpoint_bytes(self._config) + _SPARE_BYTES
        for folder in self._tiers.folders:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < needed:
                message = f"{folder}: a checkpoint needs {needed} bytes, {free} are free"
                if save.required:
                    hint = f"free space, then `hlatctl resume {self._run.run_id}`; or lower checkpoint.keep"
                    raise StorageError(message, hint=hint, code=DISK_FULL)
                self._writer.pause(save, message)
                return False
        self._writer.go_on()
        self._records.begun(save.step)
        return True


def rng_state() -> dict[str, str]:
    """This process's random state, as JSON."""
    return {"torch": bytes(torch.get_rng_state().numpy()).hex()}


def set_rng_state(state: dict[str, str]) -> None:
    """Go back to a random state that :func:`rng_state` gave."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
