"""Writing of one checkpoint, in the training thread or beside it.

The writing threads of all ranks communicate over a process group of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.initial_weights import MODEL
from conf.schema import Config
from conf.training_rules import REQUIRED, SaveReason
from hlatctl.run import files
from hlatctl.run.errors import DISK_FULL, HlatctlError, StorageError, code_of, from_record, to_record
from hlatctl.run.manifest import write_manifest
from trainer.backends.base import Backend
from trainer.checkpoint.mirror import Mirror
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.trust import CheckpointRecords

STATE = "state.json"
RANKS = "world_size"
#: An error on its way to another thread or rank, as ``hlatctl.run.errors.to_record`` writes it.
Failure = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint to save, without its tensors.

    Args:
        shared: state that all ranks share; JSON.
        own: this rank's own state; JSON.
        started_s: on the monotonic clock.
    """

    step: int
    tokens: int
    reason: SaveReason
    shared: dict[str, Any]
    own: dict[str, Any]
    started_s: float

    @property
    def required(self) -> bool:
        """Whether it must not be skipped."""
        return self.reason in REQUIRED


class Writer:
    """Writes one checkpoint at a time."""

    def __init__(
        self, config: Config, backend: Backend, tiers: Tiers, records: CheckpointRecords, mirror: Mirror | None
    ) -> None:
        self._config, self._backend, self._tiers, self._records = config, backend, tiers, records
        self._mirror = mirror
        self._world = {RANKS: backend.world_size, "data_parallel_size": backend.data_parallel_size}
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._is_full = False

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written or verified."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, tensors: dict[str, Tensor], save: Save, *, stall_s: float) -> None:
        """Write, commit and verify in another thread. The tensors must not change meanwhile."""

        def work() -> None:
            if self._write(tensors, save, stall_s=stall_s):
                self._follow_up(save)

        self._start(work)

    def write_now(self, tensors: dict[str, Tensor], save: Save) -> None:
        """Write and commit now; verify in another thread."""
        if self._write(tensors, save, stall_s=None):
            self._start(lambda: self._follow_up(save))

    def join(self) -> None:
        """Wait until nothing is being written or verified."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def raise_failure(self) -> None:
        """Raise the error of the writing thread, once; rank 0 has it for all ranks."""
        failure, self._failure = self._failure, None
        if failure:
            raise from_record(failure)

    def skip(self, save: Save, reason: str) -> None:
        """Journal that a checkpoint is skipped."""
        self._records.note("checkpoint_skipped", step=save.step, reason=reason)

    def skip_for_space(self, save: Save, message: str) -> None:
        """Journal that a checkpoint is skipped because the disk is full; the first time also an alarm."""
        self.skip(save, message)
        if not self._is_full:
            self._is_full = True
            message = f"{message}; checkpoints are skipped until there is enough space"
            self._records.note("alarm", durable=True, step=save.step, what="disk_full", message=message)

    def has_space(self) -> None:
        """Note that there is enough space, so that the next full disk is an alarm again."""
        self._is_full = False

    def _write(self, tensors: dict[str, Tensor], save: Save, *, stall_s: float | None) -> bool:
        """Write and commit together with the other ranks; return whether the checkpoint is committed.

        Args:
            tensors: must not change meanwhile.
            save: the rest of the checkpoint.
            stall_s: how long training waited; None: it waits until the commit.
        """
        temporary = self._tiers.temporary(save.step)

        def write_part() -> None:
            self._backend.save(tensors, temporary)
            files.write_json(temporary / rank_file(self._backend.rank), save.own)

        failure = (
            self._together(lambda: self._tiers.begin(save.step), all_ranks=False)
            or self._together(write_part, all_ranks=True)
            or self._together(lambda: self._commit(temporary, save, stall_s), all_ranks=False)
        )
        if failure and self._backend.rank == 0:
            self._tiers.abandon(save.step)
            message = f"checkpoint of step {save.step} can't be written to {temporary} ({failure['message'][:500]})"
            self._failed(save, message, failure["code"])
        return failure is None

    def _together(self, work: Callable[[], None], *, all_ranks: bool) -> Failure | None:
        """Call ``work`` on rank 0, or on every rank; return the first error on every rank."""
        own = None
        if all_ranks or self._backend.rank == 0:
            try:
                work()
            except Exception as error:  # any error must reach all ranks
                own = self.failure_of(error)
        return next((failure for failure in self._backend.gather_beside(own) if failure), None)

    def _commit(self, temporary: Path, save: Save, stall_s: float | None) -> None:
        files.write_json(temporary / STATE, save.shared)
        files.write_json(temporary / MODEL, asdict(self._config.model))
        manifest = write_manifest(temporary, step=save.step, tokens=save.tokens, world=self._world)
        wall_s = time.monotonic() - save.started_s
        self._records.note(
            "checkpoint_written",
            step=save.step,
            tokens=save.tokens,
            bytes=manifest.size_bytes,
            wall_s=wall_s,
            stall_s=wall_s if stall_s is None else stall_s,
            reason=save.reason,
        )
        self._tiers.commit(save.step)
        self._records.committed(save.step, manifest.sha256)

    def _follow_up(self, save: Save) -> None:
        """Verify the checkpoint, on rank 0, and have the mirror copy it, on all ranks."""
        try:
            self._conclude(save)
        finally:
            if self._mirror:
                self._mirror.offer([save.step] if self._records.is_verified(save.step) else [])

    def _conclude(self, save: Save) -> None:
        """On rank 0: copy the checkpoint to shared storage, verify it, and delete checkpoints that aren't needed."""
        if self._backend.rank != 0:
            return
        try:
            folder = self._tiers.copy_to_shared(save.step)
            if save.reason != "stop":  # stopping must be fast; the next attempt verifies it
                self._records.verify(save.step, folder)
            self._records.delete_unneeded()
        except OSError as error:
            message = f"checkpoint of step {save.step} can't be copied to {self._tiers.shared} ({error})"
            self._failed(save, message, code_of(error))

    def _failed(self, save: Save, message: str, code: str) -> None:
        """Journal an error; the next save raises it, unless the disk is full and the checkpoint isn't required."""
        if code == DISK_FULL and not save.required:
            self.skip_for_space(save, message)
            return
        self._records.note("alarm", durable=True, step=save.step, what="checkpoint_failed", code=code, message=message)
        self._failure = to_record(StorageError(message, code=code))

    def failure_of(self, error: Exception) -> Failure:
        """Return an error in the form that is sent to other ranks."""
        if not isinstance(error, HlatctlError):
            where = f"{self._tiers.folders[0]}: rank {self._backend.rank}"
            error = StorageError(f"{where}: {type(error).__name__}: {error}", code=code_of(error))
        return to_record(error)

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # usually a lost peer; the training thread raises it
                self._failure = self.failure_of(error)

        # A daemon thread, so that a process can exit without waiting for a lost peer.
        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank:05d}.json"
