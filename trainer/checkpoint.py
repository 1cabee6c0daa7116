"""Checkpoints: written whole, verified before they are trusted, kept as long as they are wanted.

A checkpoint is a folder: safetensors shards (through the backend), ``state.json`` (what all ranks share),
``rank-00000.json`` (what each has for itself), ``model.json`` (the shape) and ``manifest.json`` last. It is made under
``.tmp-step-…`` and renamed.
There is no pickle in it, and none is ever loaded.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.initial_weights import MODEL, check_initial_weights
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import CheckpointError, HlatctlError, StorageError, error_types
from hlatctl.run.journal import JournalWriter, read_events
from hlatctl.run.manifest import (
    MANIFEST,
    checkpoint_steps,
    folder_steps,
    read_manifest,
    why_invalid,
    write_manifest,
)
from hlatctl.run.paths import RunPaths, step_name
from trainer.backends.base import Backend

STATE = "state.json"
#: What the names of the weights begin with, among all tensors of a checkpoint.
WEIGHTS = "model."
_RANKS = "world_size"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
#: Free space is asked for with this much to spare, for the small files and the journal.
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


class Checkpointer:
    """Writes, restores and removes the checkpoints of a run; every method is called by all ranks together.

    Args:
        config: of the run.
        run: its directory.
        backend: moves the tensors.
        journal: rank 0's, else None.
    """

    def __init__(self, config: Config, run: RunPaths, backend: Backend, journal: JournalWriter | None) -> None:
        self._config, self._run, self._backend, self._journal = config, run, backend, journal
        self._world = {_RANKS: backend.world_size, "data_parallel_size": backend.data_parallel_size}
        self._rejected: set[int] = set()

    def save(
        self, tensors: dict[str, Tensor], *, step: int, tokens: int, reason: str, shared: dict[str, Any],
        own: dict[str, Any],
    ) -> None:  # fmt: skip
        """Write a checkpoint, commit it, and only then remove those no longer wanted.

        Raises:
            StorageError: too little space, or the storage fails; earlier checkpoints are as they were.
        """
        started = time.monotonic()
        temporary = self._run.checkpoints / f"{_TEMPORARY}{step_name(step)}"
        self._on_rank0(lambda: self._begin(temporary, tensors))
        failure = ""
        try:
            self._backend.save(tensors, temporary)
            files.write_json(temporary / _rank_file(self._backend.rank), own)
        except Exception as error:  # whatever it is, all ranks must hear of it
            failure = f"rank {self._backend.rank}: {type(error).__name__}: {error}"
        failures = [text for text in self._backend.gather(failure) if text]
        if failures:
            raise StorageError(f"checkpoint of step {step} can't be written to {temporary} ({failures[0][:500]})")
        self._on_rank0(lambda: self._commit(temporary, step=step, tokens=tokens, shared=shared))
        if self._journal:
            size = sum(entry["bytes"] for entry in read_manifest(self._run.checkpoint(step)).files)
            self._journal.append(
                "checkpoint_written", durable=True, step=step, tokens=tokens, bytes=size,
                wall_s=time.monotonic() - started, reason=reason,
            )  # fmt: skip
            self._remove_unwanted(step)

    def restore(self, tensors: dict[str, Tensor], max_step: int | None = None) -> Restored | None:
        """Read the newest valid checkpoint, up to a step, into the tensors; None if none was ever written.

        Raises:
            CheckpointError: some were written and none is valid.
        """
        step = self._backend.from_rank0(self._on_rank0(lambda: self._choose(max_step)))
        if step is None:
            return None
        folder = self._run.checkpoint(step)
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
        self._note("initial_weights", path=os.fspath(folder))

    def _on_rank0(self, work: Any) -> Any:
        """Do something on rank 0 alone; its error is raised on every rank, so that none waits for another."""
        result, failure = None, None
        if self._backend.rank == 0:
            try:
                result = work()
            except HlatctlError as error:
                failure = [type(error).__name__, error.message, error.hint]
            except OSError as error:
                failure = ["StorageError", f"{self._run.checkpoints}: {error.strerror or error}", ""]
        failure = self._backend.from_rank0(failure)
        if failure:
            raise error_types()[failure[0]](failure[1], hint=failure[2])
        return result

    def _begin(self, temporary: Path, tensors: dict[str, Tensor]) -> None:
        self._run.checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + _SPARE_BYTES
        free = shutil.disk_usage(self._run.checkpoints).free
        if free < needed:
            raise StorageError(
                f"{self._run.checkpoints}: a checkpoint needs {needed} bytes, {free} are free",
                hint=f"free space, then `hlatctl resume {self._run.run_id}`; or lower checkpoint.keep",
            )
        temporary.mkdir()

    def _commit(self, temporary: Path, *, step: int, tokens: int, shared: dict[str, Any]) -> None:
        files.write_json(temporary / STATE, shared)
        files.write_json(temporary / MODEL, asdict(self._config.model))
        write_manifest(temporary, step=step, tokens=tokens, world=self._world)
        target = self._run.checkpoint(step)
        replaced = self._run.checkpoints / f"{_REPLACED}{step_name(step)}"
        if target.exists():  # one that was rejected, or that an earlier attempt left behind
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        temporary.rename(target)
        files.fsync_dir(self._run.checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)

    def _choose(self, max_step: int | None) -> int | None:
        """The newest valid step, by bytes and checksums; what is not valid is journalled."""
        if self._run.checkpoints.is_dir():
            for left_over in self._run.checkpoints.iterdir():
                if left_over.name.startswith((_TEMPORARY, _REPLACED)):
                    shutil.rmtree(left_over, ignore_errors=True)
        for step in reversed([s for s in folder_steps(self._run) if max_step is None or s <= max_step]):
            reason = why_invalid(self._run.checkpoint(step))
            if reason is None:
                self._note("checkpoint_verified", step=step)
                return step
            self._rejected.add(step)
            self._note("checkpoint_rejected", step=step, reason=reason)
        written = sorted({event["step"] for event in read_events(self._run) if event["kind"] == "checkpoint_written"})
        if self._rejected or written:
            raise CheckpointError(
                f"{self._run.checkpoints}: no valid checkpoint, though steps {written or sorted(self._rejected)} "
                "were written; the run will not silently begin again",
                hint="bring the folder back from a copy, or start a new run",
            )
        return None

    def _remove_unwanted(self, newest: int) -> None:
        """Keep the newest few and the milestones'; rejected ones go first, whatever their age."""
        steps = [step for step in checkpoint_steps(self._run) if step not in self._rejected or step == newest]
        rolling = [step for step in steps if step not in self._config.milestones]
        unwanted = {*rolling[: -self._config.checkpoint.keep], *(self._rejected - {newest})}
        for step in sorted(unwanted):
            folder = self._run.checkpoint(step)
            (folder / MANIFEST).unlink(missing_ok=True)  # first, so that half a folder never counts
            shutil.rmtree(folder, ignore_errors=True)
            self._note("checkpoint_deleted", step=step)
        self._rejected.clear()

    def _note(self, kind: str, **fields: Any) -> None:
        if self._journal:
            self._journal.append(kind, **fields)


def rng_state() -> dict[str, str]:
    """This process's random state, as JSON."""
    return {"torch": bytes(torch.get_rng_state().numpy()).hex()}


def set_rng_state(state: dict[str, str]) -> None:
    """Go back to a random state that :func:`rng_state` gave."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
