"""Checkpoints: copied to host memory while training waits, written beside it, committed whole or not at all.

A checkpoint is a folder: safetensors shards (through the backend), ``state.json`` (what all ranks share),
``rank-00000.json`` (what each has for itself), ``model.json`` (the shape) and ``manifest.json`` last. It is made under
a temporary name and renamed. There is no pickle in it, and none is ever loaded. Where it lies is ``trainer.tiers``'
business; what becomes of it later, ``trainer.trust``'s.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.initial_weights import MODEL, check_initial_weights
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError, StorageError, error_types
from hlatctl.run.journal import JournalWriter
from hlatctl.run.manifest import read_manifest, write_manifest
from hlatctl.run.paths import RunPaths
from trainer.backends.base import Backend
from trainer.tiers import Tiers
from trainer.trust import Ledger

STATE = "state.json"
#: What the names of the weights begin with, among all tensors of a checkpoint.
WEIGHTS = "model."
_RANKS = "world_size"
#: Free space is asked for with this much to spare, for the small files and the journal.
_SPARE_BYTES = 1 << 20
#: Saves that are never left out: training ends with them, or an evaluation waits for them.
_REQUIRED = ("final", "stop", "milestone")
#: How an error crosses from thread to thread and from rank to rank: name of its type, message, hint.
Failure = list[str]


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


@dataclass(frozen=True, kw_only=True)
class _Save:
    """One save, besides its tensors."""

    step: int
    tokens: int
    reason: str
    shared: dict[str, Any]
    own: dict[str, Any]
    started_s: float

    @property
    def required(self) -> bool:
        return self.reason in _REQUIRED


class Checkpointer:
    """Writes, restores and removes the checkpoints of a run.

    All ranks call the methods together, from the training thread. What the writing threads of the ranks tell each other
    goes over a process group of their own.

    Args:
        config: of the run.
        run: its directory.
        backend: moves the tensors.
        journal: rank 0's, else None.
    """

    def __init__(self, config: Config, run: RunPaths, backend: Backend, journal: JournalWriter | None) -> None:
        self._config, self._run, self._backend = config, run, backend
        self._world = {_RANKS: backend.world_size, "data_parallel_size": backend.data_parallel_size}
        self._tiers = Tiers(config, run)
        self._ledger = Ledger(config, run, self._tiers, journal)
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._paused = False

    def save(
        self, tensors: dict[str, Tensor], *, step: int, tokens: int, reason: str, shared: dict[str, Any],
        own: dict[str, Any],
    ) -> None:  # fmt: skip
        """Take a checkpoint; when this returns the tensors may change.

        It is written beside training, except that ``final`` and ``stop`` (or ``checkpoint.mode=sync``) are waited for.
        One that is not required is left out where the disk is full, or the one before is still being written and
        ``checkpoint.when_busy=skip``; the journal says so.

        Raises:
            StorageError: too little space for a required one, or the storage failed, for this one or the one before;
                earlier checkpoints are as they were.
        """
        started_s = time.monotonic()
        save = _Save(step=step, tokens=tokens, reason=reason, shared=shared, own=own, started_s=started_s)
        if not self._on_rank0(lambda: self._may_begin(tensors, save)):
            return
        self._join()
        if self._config.checkpoint.mode == "sync":
            self._write(tensors, save, stall_s=None)
            self._on_rank0(self._raise_failure)
            self._start(lambda: self._verify(save))
        else:
            self._host = self._backend.to_host(tensors, self._host)
            stall_s = time.monotonic() - started_s
            self._start(lambda: self._write_and_verify(save, stall_s))
        if reason in ("final", "stop"):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            StorageError: what was being written failed.
        """
        self._join()
        self._on_rank0(self._raise_failure)

    def close(self) -> None:
        """As :meth:`wait`, where training has failed already; what else failed is in the journal."""
        self._join()

    def healthy_step(self) -> None:
        """A step was finite: the checkpoints before it have survived one more."""
        self._ledger.healthy_step()

    def restore(self, tensors: dict[str, Tensor]) -> Restored | None:
        """Read the newest valid checkpoint into the tensors; None if none was ever written.

        Raises:
            CheckpointError: some were written and none is valid.
        """
        chosen = self._backend.from_rank0(self._on_rank0(self._ledger.choose))
        if self._config.checkpoint.mode == "async":
            # Now, so that too little memory shows before anything is trained and the first save finds it mapped.
            self._host = self._backend.to_host(tensors, self._host)
        if chosen is None:
            return None
        step, folder = int(chosen[0]), Path(chosen[1])
        self._backend.load(tensors, folder)
        ranks = [files.read_json(folder / _rank_file(rank)) for rank in range(read_manifest(folder).world[_RANKS])]
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
        self._ledger.note("initial_weights", path=os.fspath(folder))

    def _on_rank0(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0 alone; its value, or its error, is every rank's, so that none waits for another."""
        result, failure = None, None
        if self._backend.rank == 0:
            try:
                result = work()
            except (HlatctlError, OSError) as error:
                failure = self._failure_of(error)
        result, failure = self._backend.from_rank0([result, failure])
        if failure:
            raise _as_error(failure)
        return result

    def _may_begin(self, tensors: dict[str, Tensor], save: _Save) -> bool:
        """Whether a save goes ahead now: the one before is written, and there is room."""
        if self._is_busy and not save.required and self._config.checkpoint.when_busy == "skip":
            self._skip(save, "the checkpoint before is still being written")
            return False
        self._join()
        self._raise_failure()
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + _SPARE_BYTES
        for folder in self._tiers.folders:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < needed:
                return self._no_room(save, f"{folder}: a checkpoint needs {needed} bytes, {free} are free")
        self._paused = False
        return True

    def _no_room(self, save: _Save, message: str) -> bool:
        if save.required:
            hint = f"free space, then `hlatctl resume {self._run.run_id}`; or lower checkpoint.keep"
            raise StorageError(message, hint=hint)
        self._skip(save, message)
        if not self._paused:
            self._paused = True
            told = f"{message}; checkpoints are left out until there is room"
            self._ledger.note("alarm", durable=True, step=save.step, what="disk_full", message=told)
        return False

    def _skip(self, save: _Save, reason: str) -> None:
        self._ledger.note("checkpoint_skipped", step=save.step, reason=reason)

    def _write_and_verify(self, save: _Save, stall_s: float) -> None:
        if self._write(self._host, save, stall_s=stall_s):
            self._verify(save)

    def _write(self, tensors: dict[str, Tensor], save: _Save, *, stall_s: float | None) -> bool:
        """Write and commit, together with the other ranks' writing threads; whether it is committed.

        Args:
            tensors: nothing changes them meanwhile.
            save: what is saved besides.
            stall_s: how long training waited; none: it still does.
        """
        temporary = self._tiers.temporary(save.step)

        def write_part() -> None:
            self._backend.save(tensors, temporary)
            files.write_json(temporary / _rank_file(self._backend.rank), save.own)

        failure = (
            self._beside(lambda: self._tiers.begin(save.step), everywhere=False)
            or self._beside(write_part, everywhere=True)
            or self._beside(lambda: self._commit(temporary, save, stall_s), everywhere=False)
        )
        if failure and self._backend.rank == 0:
            self._tiers.abandon(save.step)
            self._failed(save, f"checkpoint of step {save.step} can't be written to {temporary} ({failure[1][:500]})")
        return failure is None

    def _beside(self, work: Callable[[], None], *, everywhere: bool) -> Failure | None:
        """Do something on rank 0, or on every rank; the first error, on every rank."""
        failure = None
        if everywhere or self._backend.rank == 0:
            try:
                work()
            except Exception as error:  # whatever it is, all ranks must hear of it
                failure = self._failure_of(error)
        return next((found for found in self._backend.gather_beside(failure) if found), None)

    def _commit(self, temporary: Path, save: _Save, stall_s: float | None) -> None:
        files.write_json(temporary / STATE, save.shared)
        files.write_json(temporary / MODEL, asdict(self._config.model))
        manifest = write_manifest(temporary, step=save.step, tokens=save.tokens, world=self._world)
        wall_s = time.monotonic() - save.started_s
        self._ledger.note(
            "checkpoint_written", step=save.step, tokens=save.tokens, bytes=manifest.size_bytes, wall_s=wall_s,
            stall_s=wall_s if stall_s is None else stall_s, reason=save.reason,
        )  # fmt: skip
        self._tiers.commit(save.step)
        self._ledger.committed(save.step, manifest.sha256)

    def _verify(self, save: _Save) -> None:
        """On rank 0: bring the checkpoint to shared storage, read it again, and remove those no longer wanted."""
        if self._backend.rank != 0:
            return
        try:
            folder = self._tiers.copy_to_shared(save.step)
            if save.reason != "stop":  # whoever asked for it waits, and it is read again before anything goes on
                self._ledger.verify(save.step, folder)
            self._ledger.delete_unwanted()
        except OSError as error:
            self._failed(save, f"checkpoint of step {save.step} can't be copied to {self._tiers.shared} ({error})")

    def _failed(self, save: _Save, message: str) -> None:
        """Journal a failure beside training; the next save raises it, unless a full disk made an unrequired one fail.

        Errors of other ranks come as text, so that is where a full disk is recognised.
        """
        full = [code for code in (errno.ENOSPC, errno.EDQUOT) if os.strerror(code) in message]
        if full and not save.required:
            self._no_room(save, message)
            return
        self._ledger.note("alarm", durable=True, step=save.step, what="checkpoint_failed", message=message)
        self._failure = ["StorageError", message, ""]

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise _as_error(failure)

    def _failure_of(self, error: Exception) -> Failure:
        if isinstance(error, HlatctlError):
            return [type(error).__name__, error.message, error.hint]
        return [
            "StorageError",
            f"{self._tiers.folders[0]}: rank {self._backend.rank}: {type(error).__name__}: {error}",
            "",
        ]

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # a peer is gone, most likely; the training thread must hear of anything
                self._failure = self._failure_of(error)

        # A daemon: a process that is to end does not wait for a peer that is gone.
        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None


def rng_state() -> dict[str, str]:
    """This process's random state, as JSON."""
    return {"torch": bytes(torch.get_rng_state().numpy()).hex()}


def set_rng_state(state: dict[str, str]) -> None:
    """Go back to a random state that :func:`rng_state` gave."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def _as_error(failure: Failure) -> HlatctlError:
    name, message, hint = failure
    return error_types()[name](message, hint=hint)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
