"""Save and restore checkpoints.

Tensors are copied to host memory while training waits, and written during training. A checkpoint is a folder: each
rank's safetensors shard, ``tensors.jsonl`` (where each tensor is in the shards), ``state.json`` (state that all ranks
share), ``ranks.json`` (each rank's own state), ``model.json`` (the shape) and ``manifest.json``, which is written
last. Each rank hashes and verifies its own shard. The folder is written under a temporary name and then renamed. It
contains no pickle, and none is ever loaded.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from conf.initial_weights import check_initial_weights, damaged
from conf.schema import Config
from conf.sizes import checkpoint_bytes
from conf.training_rules import BLOCKING, CheckpointPolicy, SaveReason
from hlatctl.run import files, memory
from hlatctl.run.checkpoint import RankStates, read_rank_states
from hlatctl.run.errors import DISK_FULL, StorageError
from hlatctl.run.files import reading
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from trainer.backends.base import Backend, Member
from trainer.checkpoint.memory import Limits, MemoryCopies
from trainer.checkpoint.remote import Chosen, Fetcher, Uploader
from trainer.checkpoint.together import Together, on_rank0
from trainer.checkpoint.trust import CheckpointRecords, Tiers, Verifier
from trainer.checkpoint.writer import STATE, Save, Shards, Storage, Writer

#: What an attempt starts from: no checkpoint of its own, a checkpoint, or copies in the memory of the nodes, of which
#: some came from another node (``partner``).
RestoredFrom = Literal["nothing", "storage", "memory", "partner"]
#: A save also leaves this much space free, for the journal.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state of a checkpoint, without its tensors.

    Args:
        shared: state that all ranks share.
        loader: rows of all ranks' data loaders. The number of ranks may have been different.
        rng: the random state for this rank.
    """

    step: int
    shared: dict[str, Any]
    loader: list[list[int]]
    rng: dict[str, str]


class CheckpointManager:
    """Saves and restores a run's checkpoints. All ranks call each method together, from the training thread.

    Only rank 0 has a journal. Nothing is written after the end of the attempt. ``storage`` is the format of the
    tensors' files; None: this project's own.
    """

    def __init__(
        self,
        config: Config,
        run: RunPaths,
        backend: Member,
        journal: JournalWriter | None,
        *,
        attempt: int = 0,
        storage: Storage | None = None,
    ) -> None:
        self._config, self._run, self._backend, self._attempt = config, run, backend, attempt
        self._storage = storage or Shards(cast(Backend, backend))
        self._tiers = Tiers(config, run, attempt)
        self._records = CheckpointRecords(config, run, self._tiers, journal)
        self._host: dict[str, Tensor] = {}
        self._together = Together(backend, self._tiers.folders[0], self._records.limit_s)
        self._verifier = Verifier(backend, self._together)
        self._uploader: Uploader | None = None
        self._fetcher: Fetcher | None = None
        if config.checkpoint.remote_url is not None:
            self._uploader = Uploader(config, run, backend, self._records)
            self._fetcher = Fetcher(config, run, backend, self._tiers, self._records)
        self._memory: MemoryCopies | None = None
        if config.checkpoint.memory_every_steps and attempt:
            self._memory = MemoryCopies(config, run, backend, attempt)
        #: Where :meth:`choose` has found what the attempt starts from.
        self.restored_from: RestoredFrom = "nothing"
        self._told_of_memory = ""
        self._writer = Writer(
            config, backend, self._storage, self._tiers, self._records, self._together, self._verifier, self._uploader
        )

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

        The checkpoint is written during training. This call waits for it if the reason is in ``BLOCKING``, or with
        ``checkpoint.mode=sync``. A checkpoint that is not ``REQUIRED`` is skipped, with an event, if the disk is full,
        or if the previous one is still being written and ``checkpoint.when_busy=skip``. Raises a StorageError if there
        is too little space for a required checkpoint, or the storage failed during this save or the previous one.
        Earlier checkpoints don't change.
        """
        started_s = time.monotonic()
        save = Save(step=step, tokens=tokens, reason=reason, shared=shared, own=own, started_s=started_s)
        if self._on_rank0(lambda: self._is_skipped(save)):
            return
        self._writer.join()  # on every rank: no collective waits for storage
        if not self._on_rank0(lambda: self._may_begin(save)):
            return
        if self._config.checkpoint.mode == "sync":
            self._writer.write_now(self._storage.for_writing(tensors), save)
            self._on_rank0(self._writer.raise_failure)
        else:
            self._host = self._storage.to_host(tensors, self._host)
            stall_s = time.monotonic() - started_s
            self._writer.start(self._host, save, stall_s=stall_s)
        if reason in BLOCKING:
            self.wait()

    def copies_after(self, step: int) -> bool:
        """Return whether a step is copied to memory."""
        every = self._config.checkpoint.memory_every_steps
        return self._memory is not None and every is not None and step % every == 0

    def copy_to_memory(
        self, tensors: dict[str, Tensor], step: int, shared: dict[str, Any], own: dict[str, Any]
    ) -> None:
        """Copy a step to the memory of this node and of its partner, during training; a failure is a warning."""
        assert self._memory
        self._tell_of_memory(self._memory.copy(tensors, step, shared, own), f"step {step} is not copied to memory")

    def leave_memory(self) -> None:
        """Remove the copies in memory at an orderly end: the next attempt starts from a checkpoint."""
        if self._memory:
            self._memory.remove()

    def _tell_of_memory(self, why: str, what: str) -> None:
        """Warn of each reason once."""
        if why and why != self._told_of_memory:
            self._told_of_memory = why
            message = f"checkpoint.memory_every_steps={self._config.checkpoint.memory_every_steps}: {what}: {why}"
            self._records.note("warning", message=message)
            if self._backend.rank == 0:
                print(f"warning: {message}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Wait until the checkpoint is written. Raises a StorageError if it could not be written."""
        self._writer.join()
        self._on_rank0(self._writer.raise_failure)

    def finish(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait at the end of a run until its last checkpoint is in the remote folder, if it has one."""
        if self._uploader:
            self._uploader.finish(is_asked_to_stop)

    def close(self) -> None:
        """Wait without raising an error, for training that has failed; the journal has the error."""
        self._writer.join()
        if self._uploader:
            self._uploader.close()

    def reconfigure(self, config: Config) -> None:
        """Apply new values of the keys in ``conf.amendments.LIVE`` during training."""
        self._config = config
        self._records.reconfigure(config)
        if self._uploader:
            self._uploader.reconfigure(config)

    def healthy_step(self) -> None:
        """Count a finite step for the checkpoints before it."""
        self._records.healthy_step()

    def restore(self, tensors: dict[str, Tensor], chosen: Chosen) -> Restored | None:
        """Read the checkpoint from :meth:`choose` into the tensors; return None if there is none.

        Raises a CheckpointError if it doesn't have these tensors.
        """
        if self._config.checkpoint.mode == "async":
            # Allocate now, so that too little memory is an error before training, and the first save is fast.
            self._host = self._storage.reserve(tensors)
        restored = self._restore(tensors, chosen)
        if self._memory:
            self._memory.begin(tensors)
            self._tell_of_memory(self._memory.problem, "no step is copied to memory")
        return restored

    def _restore(self, tensors: dict[str, Tensor], chosen: Chosen) -> Restored | None:
        if chosen is None:
            return None
        if self._memory and self._memory.chosen:
            state, ranks = self._memory.chosen.state, RankStates.of(self._memory.load(tensors))
            return Restored(step=chosen[0], shared=state, loader=ranks.loader, rng=ranks.rng_for(self._backend.rank))
        step, folder = chosen[0], Path(chosen[1])
        self._storage.read(tensors, folder, self._together)
        shared, states = self._together.on_rank0(lambda: _states(folder))
        self.restored_from = "storage"
        ranks = RankStates(**states)
        return Restored(step=step, shared=shared, loader=ranks.loader, rng=ranks.rng_for(self._backend.rank))

    def choose(self, max_step: int | None = None) -> Chosen:
        """Return step and folder of the newest checkpoint that all ranks find valid; None if none was ever written.

        It is fetched if the remote folder has a newer one. A step that is in the nodes' memory is chosen if it is newer
        than all checkpoints. Raises a CheckpointError if checkpoints were written and
        none is valid.

        Args:
            max_step: ignore newer checkpoints.
        """
        in_memory = self._newest_in_memory(max_step)
        if self._fetcher is None or self._uploader is None:
            return in_memory or self._newest_valid(max_step)
        chosen, missing = self._fetcher.choose(lambda: in_memory or self._newest_valid(max_step), max_step)
        self._uploader.offer([step for step in missing if not in_memory or step != in_memory[0]])
        return chosen

    def _newest_in_memory(self, max_step: int | None) -> Chosen:
        if self._memory is None:
            return None
        self._together.on_rank0(self._records.start)
        step = self._memory.choose(Limits(**self._on_rank0(lambda: asdict(self._limits(max_step)))))
        if step is None:
            return None
        self.restored_from = self._memory.restored_from
        return step, os.fspath(memory.of_node(self._run))

    def _limits(self, max_step: int | None) -> Limits:
        """Return which copies in memory may be used: newer ones than all checkpoints that may be.

        A restart must not jump over a step whose checkpoint is needed, and was not complete.
        """
        state, listed = read_state(self._run), (step for step, _ in self._tiers.copies())
        most = sys.maxsize if max_step is None else max_step
        newest = max((step for step in (*state.checkpoints, *listed) if step <= most), default=self._config.fork.step)
        most = min(most, CheckpointPolicy(self._config).next_lasting(newest) - 1)
        usable = memory.usable(state, self._attempt)
        return Limits(after=newest, up_to=[(attempt, min(step, most)) for attempt, step in usable.items()])

    def _newest_valid(self, max_step: int | None) -> Chosen:
        self._together.on_rank0(self._records.start)
        candidates = self._records.candidates(max_step)
        while True:
            found = self._together.on_rank0(lambda: next(((n, os.fspath(path)) for n, path in candidates), None))
            if found is None:
                return None
            step, folder = int(found[0]), Path(found[1])
            reason = self._verifier.why_invalid(folder)
            self._together.on_rank0(lambda: self._records.examined(step, folder, reason))  # noqa: B023 (called now)
            if reason is None:
                self._records.chosen(step)
                return step, os.fspath(folder)

    def begin_from(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Read only the weights of another run's checkpoint, or of an imported model, into the tensors.

        Raises:
            ConfigError: the model has another shape.
            CheckpointError: a file has changed since it was written.
        """
        self._together.on_rank0(lambda: check_initial_weights(self._config))
        reason = self._verifier.why_invalid(folder, of_run=False)
        if reason:
            raise damaged(folder, reason)
        self._storage.read(self._storage.weights(tensors), folder, self._together)
        self._records.note("initial_weights", path=os.fspath(folder))

    def _on_rank0(self, work: Callable[[], Any]) -> Any:
        return on_rank0(self._backend, work, self._tiers.folders[0])

    def _is_skipped(self, save: Save) -> bool:
        if self._writer.is_busy and not save.required and self._config.checkpoint.when_busy == "skip":
            self._writer.skip(save, "the previous checkpoint is still being written")
            return True
        return False

    def _may_begin(self, save: Save) -> bool:
        self._writer.raise_failure()
        needed = checkpoint_bytes(self._config) + _SPARE_BYTES
        for folder in self._tiers.folders:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < needed and save.required and folder == self._tiers.shared:
                free = self._made_room(save, needed, free)
            if free < needed:
                message = f"{folder}: a checkpoint needs {needed} bytes, {free} are free"
                if save.required:
                    resume = f"`hlatctl resume {self._run.run_id}"
                    hint = f"free space, then {resume}`; or {resume} checkpoint.keep=N` with a smaller number"
                    raise StorageError(message, hint=hint, code=DISK_FULL)
                self._writer.skip_for_space(save, message)
                return False
        self._writer.has_space()
        self._records.begin(save.step)
        return True

    def _made_room(self, save: Save, needed: int, free: int) -> int:
        """Delete old checkpoints for one that is required, if that helps (decision 116); return the free bytes."""
        folder = self._tiers.shared
        if not self._records.make_room(needed - free):
            return free
        now_free = shutil.disk_usage(folder).free
        message = f"{folder}: {free} bytes were free; old checkpoints are deleted for that of step {save.step}"
        self._records.note("alarm", durable=True, step=save.step, what="disk_full", message=message)
        return now_free


def _states(folder: Path) -> tuple[Any, dict[str, Any]]:
    with reading(folder):
        return files.read_json(folder / STATE), asdict(read_rank_states(folder))


def seed_rng(seed: int) -> None:
    """Seed all processes with the same random state; PyTorch starts each with a different one."""
    torch.default_generator.manual_seed(seed)


def rng_state() -> dict[str, str]:
    """Return this process's random state, as JSON."""
    return {"torch": bytes(torch.get_rng_state().numpy()).hex()}


def set_rng_state(state: dict[str, str]) -> None:
    """Restore a random state from :func:`rng_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
