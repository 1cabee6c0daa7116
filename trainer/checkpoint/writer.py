"""Write one checkpoint, during training or while training waits.

The writing threads of all ranks communicate over a separate process group. With a fast folder, a checkpoint is written
to the node's own disk first; then each rank copies its share to the run directory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from conf.initial_weights import MODEL
from conf.schema import Config
from conf.training_rules import REQUIRED, SaveReason
from hlatctl.run import files
from hlatctl.run.checkpoint import RANK_STATES, WORLD_SIZE, RankStates, read_manifest, write_manifest
from hlatctl.run.errors import DISK_FULL, HlatctlError, RunBusyError, StorageError, from_record, to_record
from hlatctl.run.paths import step_name
from trainer.backends.base import Backend, Member
from trainer.checkpoint.remote import Uploader
from trainer.checkpoint.shards import INDEX, WEIGHTS, ShardFile, ShardIndex, StoredChunk, compose, file_name, read_index
from trainer.checkpoint.together import Failure, Together
from trainer.checkpoint.trust import CheckpointRecords, ReadBack, Tiers, Verifier, share


def copy_to_shared(step: int, tiers: Tiers, backend: Member, together: Together) -> Path:
    """Return a committed checkpoint's folder in the run directory, after copying it if there is a fast folder.

    All ranks call this together.

    Raises:
        HlatctlError: a rank can't copy its share; raised on all ranks. The incomplete copy is removed.
    """
    if tiers.fast is None:
        return tiers.shared / step_name(step)
    source = tiers.fast / step_name(step)

    def copy_share() -> None:
        entries = share(read_manifest(source).files, backend.rank, backend.world_size)
        tiers.copy(step, [entry["path"] for entry in entries])

    try:
        together.on_rank0(lambda: tiers.begin_copy(step))
        together.everywhere(copy_share)
        return Path(together.on_rank0(lambda: os.fspath(tiers.finish_copy(step))))
    except HlatctlError:
        if backend.rank == 0:
            tiers.abandon_copy(step)
        raise


STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint to save, without its tensors.

    Args:
        shared: state that all ranks share; JSON.
        own: this rank's own state; JSON.
        started_s: start time on the monotonic clock, s.
    """

    step: int
    tokens: int
    reason: SaveReason
    shared: dict[str, Any]
    own: dict[str, Any]
    started_s: float

    @property
    def required(self) -> bool:
        """Whether the checkpoint must not be skipped."""
        return self.reason in REQUIRED


class Storage(Protocol):
    """How tensors become the files of a checkpoint. All ranks call each method together, except :meth:`finish`."""

    def reserve(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return host memory for :meth:`to_host`, or an empty dictionary."""

    def to_host(self, tensors: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
        """Copy this process's tensors to host memory, into the result of an earlier call or of :meth:`reserve`."""

    def for_writing(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return tensors in a form that :meth:`write` can read while training waits."""

    def shard(self) -> str:
        """Return the name of the file that this process writes."""

    def write(self, tensors: dict[str, Any], folder: Path, together: Together) -> list[dict[str, Any]]:
        """Write the tensors; return the manifest's entries of all ranks' files, on rank 0 at least."""

    def finish(self, folder: Path) -> list[str]:
        """Write what describes all ranks' files, on rank 0; return the names of these files."""

    def read(self, tensors: dict[str, Any], folder: Path, together: Together) -> None:
        """Read a verified checkpoint into the tensors. Raises a CheckpointError if it doesn't have them."""

    def weights(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the model's weights among the tensors of a checkpoint."""


class Shards:
    """This project's own format, which a :class:`trainer.backends.base.Backend` writes (``trainer.checkpoint.shards``).

    The ranks send rank 0 the positions in their shards only if they have changed since the previous save.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.to_host, self.for_writing = backend.to_host, backend.for_writing
        #: From the previous save: this rank's blocks, and on rank 0 the index of all blocks.
        self._chunks: list[StoredChunk] = []
        self._index: ShardIndex | None = None

    def reserve(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Storage`."""
        return self.to_host(tensors, {})

    def shard(self) -> str:
        """See :class:`Storage`."""
        return file_name(self._backend.rank + 1)

    def write(self, tensors: dict[str, Any], folder: Path, together: Together) -> list[dict[str, Any]]:
        """See :class:`Storage`."""
        kept: list[ShardFile] = []

        def write() -> dict[str, Any]:
            shard = self._backend.save(tensors, folder)
            kept.extend([shard] if shard else [])
            return {"entry": shard and shard.entry, "changed": (shard.chunks if shard else []) != self._chunks}

        written = together.everywhere(write)
        if any(part["changed"] for part in written):
            chunks = kept[0].chunks if kept else []
            stored = self._backend.to_rank0_beside(chunks)
            together.on_rank0(lambda: self._make_index(written, stored))
            self._chunks = chunks
        return [part["entry"] for part in written if part["entry"]]

    def _make_index(self, written: list[dict[str, Any]], stored: list[Any]) -> None:
        pairs = zip(written, stored, strict=True)
        shards = {part["entry"]["path"]: [StoredChunk(*chunk) for chunk in chunks] for part, chunks in pairs if chunks}
        self._index = compose(shards)

    def finish(self, folder: Path) -> list[str]:
        """See :class:`Storage`."""
        assert self._index is not None
        files.write_text(folder / INDEX, self._index.text)
        return [INDEX]

    def read(self, tensors: dict[str, Any], folder: Path, together: Together) -> None:
        """See :class:`Storage`."""
        index = ShardIndex(together.on_rank0(lambda: read_index(folder).text))
        put: list[Callable[[], None]] = []
        together.everywhere(lambda: put.append(self._backend.load(tensors, folder, index)))
        put[0]()

    def weights(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Storage`."""
        return {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}


class Writer:
    """Writes one checkpoint at a time."""

    def __init__(
        self,
        config: Config,
        backend: Member,
        storage: Storage,
        tiers: Tiers,
        records: CheckpointRecords,
        together: Together,
        verifier: Verifier,
        uploader: Uploader | None,
    ) -> None:
        self._config, self._backend, self._tiers, self._records = config, backend, tiers, records
        self._storage = storage
        self._together, self._verifier, self._uploader = together, verifier, uploader
        self._world = {WORLD_SIZE: backend.world_size, "data_parallel_size": backend.data_parallel_size}
        self._read_back: ReadBack | None = None
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
        """Wait until no checkpoint is being written or verified."""
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
        """Record that there is enough space, so that the next full disk is an alarm again."""
        self._is_full = False

    def _write(self, tensors: dict[str, Tensor], save: Save, *, stall_s: float | None) -> bool:
        """Write and commit together with the other ranks; return whether the checkpoint is committed.

        ``stall_s`` is how long training waited; None: it waits until the commit.
        """
        temporary = self._tiers.temporary(save.step)
        try:
            self._together.on_rank0(lambda: self._tiers.begin(save.step))
            self._read_back = self._follow(temporary, save) if stall_s is not None else None
            entries = self._write_files(tensors, temporary)
            ranks = self._backend.to_rank0_beside(save.own)
            self._together.on_rank0(lambda: self._commit(temporary, save, entries, ranks, stall_s))
        except HlatctlError as error:  # on every rank
            if self._backend.rank == 0:
                self._tiers.abandon(save.step)
                message = f"checkpoint of step {save.step} can't be written to {temporary} ({error.message[:500]})"
                self._failed(save, message, error)
            return False
        return True

    def _follow(self, folder: Path, save: Save) -> ReadBack | None:
        """Return a reader of this rank's shard while it is written during training; None if it won't be verified."""
        is_verified = self._tiers.fast is None and save.reason != "stop"
        return ReadBack(folder / self._storage.shard()) if is_verified else None

    def _write_files(self, tensors: dict[str, Tensor], folder: Path) -> list[dict[str, Any]]:
        """Write each rank's files; return the manifest's entries of all."""
        try:
            self._together.everywhere(self._tiers.check)
            return self._storage.write(tensors, folder, self._together)
        finally:
            if self._read_back:
                self._read_back.written()

    def _commit(
        self,
        temporary: Path,
        save: Save,
        entries: list[dict[str, Any]],
        ranks: list[dict[str, Any]],
        stall_s: float | None,
    ) -> None:
        index = self._storage.finish(temporary)
        files.write_json(temporary / STATE, save.shared)
        files.write_json(temporary / MODEL, asdict(self._config.model))
        files.write_json(temporary / RANK_STATES, asdict(RankStates.of(ranks)))
        own = [files.describe(temporary, temporary / name) for name in (STATE, MODEL, RANK_STATES, *index)]
        manifest = write_manifest(
            temporary, step=save.step, tokens=save.tokens, world=self._world, entries=[*entries, *own]
        )
        wall_s = time.monotonic() - save.started_s
        self._records.written(
            step=save.step,
            tokens=save.tokens,
            size_bytes=manifest.size_bytes,
            wall_s=wall_s,
            stall_s=wall_s if stall_s is None else stall_s,
            reason=save.reason,
        )
        self._tiers.commit(save.step)
        self._records.committed(save.step, manifest.sha256)

    def _follow_up(self, save: Save) -> None:
        """Copy the checkpoint to shared storage, verify it, and delete checkpoints that aren't needed.

        All ranks take part to the end, so that none waits in a training collective for rank 0 to delete files.
        """
        try:
            folder = copy_to_shared(save.step, self._tiers, self._backend, self._together)
            if save.reason != "stop":  # stopping must be fast; the next attempt verifies it
                reason = self._verifier.why_invalid(folder, from_storage=True, read_back=self._read_back)
                self._together.on_rank0(lambda: self._examined(save.step, folder, reason))
            self._together.on_rank0(self._records.delete_unneeded)
        except HlatctlError as error:
            if self._backend.rank == 0:
                message = f"checkpoint of step {save.step} can't be verified in {self._tiers.shared} ({error.message})"
                self._failed(save, message, error)
        if self._uploader:
            self._uploader.offer([save.step] if self._records.is_verified(save.step) else [])

    def _examined(self, step: int, folder: Path, reason: str | None) -> None:
        self._records.examined(step, folder, reason)
        if reason is None:
            self._tiers.trim_fast(step)

    def _failed(self, save: Save, message: str, error: HlatctlError) -> None:
        """Journal an error; the next save raises it, unless the disk is full and the checkpoint isn't required."""
        if isinstance(error, RunBusyError):  # the attempt is over, so nothing may be journalled
            self._failure = to_record(error)
            return
        code = error.code
        if code == DISK_FULL and not save.required:
            self.skip_for_space(save, message)
            return
        self._records.note("alarm", durable=True, step=save.step, what="checkpoint_failed", code=code, message=message)
        self._failure = to_record(StorageError(message, hint=error.hint, code=code))

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # usually a lost peer; the training thread raises it
                self._failure = self._together.failure_of(error)

        # A daemon thread, so that a process can exit without waiting for a lost peer.
        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()
