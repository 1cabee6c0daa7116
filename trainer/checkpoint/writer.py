"""Writing one checkpoint, in the training thread or in one beside it: the files, their manifest, and what follows.

The writing threads of all ranks work together, over a process group of their own. When to save and which checkpoint to
load is ``trainer.checkpoint.manager``'s business.
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
from hlatctl.run import files
from hlatctl.run.errors import DISK_FULL, HlatctlError, StorageError, code_of, from_record, to_record
from hlatctl.run.manifest import write_manifest
from trainer.backends.base import Backend
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.trust import CheckpointRecords

STATE = "state.json"
RANKS = "world_size"
#: Saves that are never left out: training ends with them, or an evaluation waits for them.
_REQUIRED = ("final", "stop", "milestone")
#: An error on its way to another thread or rank, as ``hlatctl.run.errors.to_record`` writes it.
Failure = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save, besides its tensors.

    Args:
        reason: as the event ``checkpoint_written`` gives it.
        shared: what all ranks have in common; JSON.
        own: what this rank has for itself; JSON.
        started_s: on the monotonic clock.
    """

    step: int
    tokens: int
    reason: str
    shared: dict[str, Any]
    own: dict[str, Any]
    started_s: float

    @property
    def required(self) -> bool:
        """It is never left out."""
        return self.reason in _REQUIRED


class Writer:
    """Writes one checkpoint at a time.

    Args:
        config: of the run.
        backend: moves the tensors.
        tiers: where the checkpoints lie.
        records: what is known of them.
    """

    def __init__(self, config: Config, backend: Backend, tiers: Tiers, records: CheckpointRecords) -> None:
        self._config, self._backend, self._tiers, self._records = config, backend, tiers, records
        self._world = {RANKS: backend.world_size, "data_parallel_size": backend.data_parallel_size}
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._paused = False

    @property
    def is_busy(self) -> bool:
        """Something is being written or read again."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, tensors: dict[str, Tensor], save: Save, *, stall_s: float) -> None:
        """Write, commit and verify beside training; nothing may change the tensors meanwhile."""

        def work() -> None:
            if self._write(tensors, save, stall_s=stall_s):
                self._follow_up(save)

        self._start(work)

    def write_now(self, tensors: dict[str, Tensor], save: Save) -> None:
        """Write and commit before this returns; verify beside training."""
        if self._write(tensors, save, stall_s=None):
            self._start(lambda: self._follow_up(save))

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def raise_failure(self) -> None:
        """Raise, once, what failed beside training; rank 0 knows for all."""
        failure, self._failure = self._failure, None
        if failure:
            raise from_record(failure)

    def leave_out(self, save: Save, reason: str) -> None:
        """Journal that a save is left out."""
        self._records.note("checkpoint_skipped", step=save.step, reason=reason)

    def pause(self, save: Save, message: str) -> None:
        """Journal that a save is left out for want of space; an alarm for the first of several."""
        self.leave_out(save, message)
        if not self._paused:
            self._paused = True
            told = f"{message}; checkpoints are left out until there is room"
            self._records.note("alarm", durable=True, step=save.step, what="disk_full", message=told)

    def go_on(self) -> None:
        """There is room again."""
        self._paused = False

    def _write(self, tensors: dict[str, Tensor], save: Save, *, stall_s: float | None) -> bool:
        """Write and commit, together with the other ranks' writing threads; whether it is committed.

        Args:
            tensors: nothing changes them meanwhile.
            save: what is saved besides.
            stall_s: how long training waited; none: it still does.
        """
        temporary = self._tiers.temporary(save.step)

        def write_part() -> None:
            self._backend.save(tensors, temporary)
            files.write_json(temporary / rank_file(self._backend.rank), save.own)

        failure = (
            self._beside(lambda: self._tiers.begin(save.step), everywhere=False)
            or self._beside(write_part, everywhere=True)
            or self._beside(lambda: self._commit(temporary, save, stall_s), everywhere=False)
        )
        if failure and self._backend.rank == 0:
            self._tiers.abandon(save.step)
            message = f"checkpoint of step {save.step} can't be written to {temporary} ({failure['message'][:500]})"
            self._failed(save, message, failure["code"])
        return failure is None

    def _beside(self, work: Callable[[], None], *, everywhere: bool) -> Failure | None:
        """Do something on rank 0, or on every rank; the first error, on every rank."""
        failure = None
        if everywhere or self._backend.rank == 0:
            try:
                work()
            except Exception as error:  # whatever it is, all ranks must hear of it
                failure = self.failure_of(error)
        return next((found for found in self._backend.gather_beside(failure) if found), None)

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
        """On rank 0: bring the checkpoint to shared storage, read it again, and remove those no longer wanted."""
        if self._backend.rank != 0:
            return
        try:
            folder = self._tiers.copy_to_shared(save.step)
            if save.reason != "stop":  # whoever asked for it waits, and it is read again before anything goes on
                self._records.verify(save.step, folder)
            self._records.delete_unwanted()
        except OSError as error:
            message = f"checkpoint of step {save.step} can't be copied to {self._tiers.shared} ({error})"
            self._failed(save, message, code_of(error))

    def _failed(self, save: Save, message: str, code: str) -> None:
        """Journal a failure beside training; the next save raises it, unless the disk was full for an optional one."""
        if code == DISK_FULL and not save.required:
            self.pause(save, message)
            return
        self._records.note("alarm", durable=True, step=save.step, what="checkpoint_failed", code=code, message=message)
        self._failure = to_record(StorageError(message, code=code))

    def failure_of(self, error: Exception) -> Failure:
        """An error, as it crosses to the other ranks."""
        if not isinstance(error, HlatctlError):
            where = f"{self._tiers.folders[0]}: rank {self._backend.rank}"
            error = StorageError(f"{where}: {type(error).__name__}: {error}", code=code_of(error))
        return to_record(error)

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # a peer is gone, most likely; the training thread must hear of anything
                self._failure = self.failure_of(error)

        # A daemon: a process that is to end does not wait for a peer that is gone.
        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()


def rank_file(rank: int) -> str:
    """Name of the file of what a rank has for itself."""
    return f"rank-{rank:05d}.json"
