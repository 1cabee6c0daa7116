"""Saving and restoring of checkpoints.

Tensors are copied to host memory while training waits, and written beside training. A checkpoint is a folder:
safetensors shards (written by the backend), ``state.json`` (state that all ranks share), ``rank-00000.json`` (a rank's
own state), ``model.json`` (the shape) and ``manifest.json``, which is written last. The folder is written under a
temporary name and then renamed. It contains no pickle, and none is ever loaded.
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
from conf.training_rules import BLOCKING, SaveReason
from hlatctl.run import files
from hlatctl.run.errors import DISK_FULL, HlatctlError, StorageError, from_record
from hlatctl.run.journal import JournalWriter
from hlatctl.run.manifest import read_manifest
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import reading
from trainer.backends.base import Backend
from trainer.checkpoint.fetch import Fetcher
from trainer.checkpoint.mirror import Mirror
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.trust import CheckpointRecords
from trainer.checkpoint.writer import RANKS, STATE, Save, Writer, rank_file

#: Prefix of the weights among a checkpoint's tensors.
WEIGHTS = "model."
#: A save also leaves this much free, for the journal.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state of a checkpoint besides its tensors.

    Args:
        step: of the checkpoint.
        shared: state that all ranks share.
        ranks: the own state of each rank that wrote it. The number of ranks may be different now.
    """

    step: int
    shared: dict[str, Any]
    ranks: list[dict[str, Any]]


class CheckpointManager:
    """Saves and restores a run's checkpoints. All ranks call each method together, from the training thread.

    Args:
        journal: rank 0's; None on other ranks.
    """

    def __init__(self, config: Config, run: RunPaths, backend: Backend, journal: JournalWriter | None) -> None:
        self._config, self._run, self._backend = config, run, backend
        self._tiers = Tiers(config, run)
        self._records = CheckpointRecords(config, run, self._tiers, journal)
        self._host: dict[str, Tensor] = {}
        self._mirror: Mirror | None = None
        self._fetcher: Fetcher | None = None
        if config.checkpoint.mirror_url is not None:
            self._mirror = Mirror(config, run, backend, self._records)
            self._fetcher = Fetcher(config, run, backend, self._tiers, self._records, self._on_rank0)
        self._writer = Writer(config, backend, self._tiers, self._records, self._mirror)

    def save(
        self,
        tensors: dict[str, Tensor],
        *,
        step: int,
        tokens: int,
        reason: SaveReason,
        shared: dict[str, Any],
        own: dict[str, Any],
    ) -> None:
        """Save a checkpoint. When this returns, the tensors may change.

        The checkpoint is written beside training. This waits for it if the reason is in ``BLOCKING``, or with
        ``checkpoint.mode=sync``. A checkpoint that is not ``REQUIRED`` is skipped, with an event, if the disk is full,
        or if the previous one is still being written and ``checkpoint.when_busy=skip``.

        Raises:
            StorageError: there is too little space for a required checkpoint, or the storage failed during this save or
                the previous one. Earlier checkpoints don't change.
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
        if reason in BLOCKING:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            StorageError: it could not be written.
        """
        self._writer.join()
        self._on_rank0(self._writer.raise_failure)

    def finish(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait at the end of a run until its last checkpoint is in the mirror, if it has one."""
        if self._mirror:
            self._mirror.finish(is_asked_to_stop)

    def close(self) -> None:
        """Wait without raising an error, for training that has failed; the journal has the error."""
        self._writer.join()
        if self._mirror:
            self._mirror.close()

    def healthy_step(self) -> None:
        """Count a finite step for the checkpoints before it."""
        self._records.healthy_step()

    def restore(self, tensors: dict[str, Tensor], max_step: int | None = None) -> Restored | None:
        """Read the newest valid checkpoint into the tensors; return None if none was ever written.

        Args:
            tensors: of the optimizer.
            max_step: ignore newer checkpoints.

        Raises:
            CheckpointError: checkpoints were written and none is valid.
        """
        chosen = self._choose(max_step)
        if self._config.checkpoint.mode == "async":
            # Allocate now, so that too little memory is an error before training, and the first save is fast.
            self._host = self._backend.to_host(tensors, self._host)
        if chosen is None:
            return None
        step, folder = int(chosen[0]), Path(chosen[1])
        self._backend.load(tensors, folder)
        with reading(folder):
            ranks = [files.read_json(folder / rank_file(rank)) for rank in range(read_manifest(folder).world[RANKS])]
            return Restored(step=step, shared=files.read_json(folder / STATE), ranks=ranks)

    def _choose(self, max_step: int | None) -> tuple[int, str] | None:
        """Return step and folder of the checkpoint to restore; with a mirror, fetch it from there if it is newer."""

        def choose() -> tuple[int, str] | None:
            chosen: tuple[int, str] | None = self._on_rank0(lambda: self._records.choose(max_step))
            return chosen

        if self._fetcher is None or self._mirror is None:
            return choose()
        chosen, unmirrored = self._fetcher.choose(choose, max_step)
        self._mirror.offer(unmirrored)
        return chosen

    def begin_from(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Read only the weights of another run's checkpoint, or of an imported model, into the tensors.

        Raises:
            ConfigError: the model has another shape.
            CheckpointError: a file has changed since it was written.
        """
        self._on_rank0(lambda: check_initial_weights(self._config, checksums=True))
        weights = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
        self._backend.load(weights, folder)
        self._records.note("initial_weights", path=os.fspath(folder))

    def _on_rank0(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` on rank 0; return its value, or raise its error, on every rank."""
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
        """Return whether to save now: the previous save is complete, and there is enough space."""
        if self._writer.is_busy and not save.required and self._config.checkpoint.when_busy == "skip":
            self._writer.skip(save, "the previous checkpoint is still being written")
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
                self._writer.skip_for_space(save, message)
                return False
        self._writer.has_space()
        self._records.begin(save.step)
        return True


def rng_state() -> dict[str, str]:
    """Return this process's random state, as JSON."""
    return {"torch": bytes(torch.get_rng_state().numpy()).hex()}


def set_rng_state(state: dict[str, str]) -> None:
    """Restore a random state from :func:`rng_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
