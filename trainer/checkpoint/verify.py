"""Verification of a checkpoint by all ranks, each its share of the files.

Checked are: size and SHA-256 of every file in the manifest; that JSON files can be parsed; that the tensors in each
shard's header fill it exactly; that the shards have every element of every tensor; that no shard is unlisted. Tensor
values are covered by the hashes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import CheckpointError
from hlatctl.run.files import read_json
from hlatctl.run.manifest import read_manifest, why_invalid
from hlatctl.run.reading import DAMAGED, why
from trainer.backends.base import Backend
from trainer.checkpoint.read_back import ReadBack
from trainer.checkpoint.together import Together
from trainer.shard_file import SUFFIX, number_of, read_header
from trainer.shard_index import INDEX, read_index


class Verifier:
    """Verifies checkpoints. All ranks call :meth:`why_invalid` together."""

    def __init__(self, backend: Backend, together: Together) -> None:
        self._backend, self._together = backend, together

    def why_invalid(
        self, folder: Path, *, of_run: bool = True, from_storage: bool = False, read_back: ReadBack | None = None
    ) -> str | None:
        """Return why a checkpoint is invalid, with the file's name; None if it is valid.

        Args:
            folder: of the checkpoint.
            of_run: it is in a run's folder of checkpoints, so its name must be that of its step.
            from_storage: read the files from storage, not from the page cache. A start doesn't: what it verifies is
                then read from the page cache.
            read_back: of this rank's shard, which is read again only if it came back differently, or not at all.
        """
        found = self._together.on_rank0(lambda: _list(folder, of_run=of_run))
        if found["reason"]:
            return str(found["reason"])
        mine = share(found["files"], self._backend.rank, self._backend.world_size)
        reasons = self._together.everywhere(lambda: _why_bad(folder, mine, read_back, from_storage=from_storage))
        reason = next(filter(None, reasons), None) or self._together.on_rank0(lambda: why_incomplete(folder))
        return None if reason is None else str(reason)


def share(entries: Iterable[dict[str, Any]], rank: int, world_size: int) -> list[dict[str, Any]]:
    """Return the files that a rank verifies: the shard that it wrote, or loads after a start with the same layout."""
    return [entry for entry in entries if ((number_of(entry["path"]) or 1) - 1) % world_size == rank]


def why_unreadable(folder: Path, names: Iterable[str]) -> str | None:
    """Return the first JSON file or shard that can't be read as its type, as ``"name: reason"``; None if all can."""
    for name in names:
        try:
            if name.endswith(".json"):
                read_json(folder / name)
            elif name.endswith(SUFFIX):
                read_header(folder / name)
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
    return None


def why_incomplete(folder: Path) -> str | None:
    """Return a tensor that the shards don't have, or a file that isn't in the manifest; None if there is none."""
    sizes = {entry["path"]: entry["bytes"] for entry in read_manifest(folder).files}
    for path in (*sorted(folder.glob(f"*{SUFFIX}")), folder / INDEX):
        if path.name not in sizes and path.exists():  # it would be read too
            return f"{path.name}: not in the manifest"
    try:
        return read_index(folder).why_incomplete(sizes)
    except CheckpointError as error:
        return error.message
    except DAMAGED as error:
        return f"{INDEX}: {why(error)}"


def drop_cached_pages(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from storage; only on Linux."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _list(folder: Path, *, of_run: bool) -> dict[str, Any]:
    reason = why_invalid(folder, checksums=False, of_run=of_run)
    return {"reason": reason, "files": [] if reason else read_manifest(folder).files}


def _why_bad(
    folder: Path, entries: list[dict[str, Any]], read_back: ReadBack | None, *, from_storage: bool
) -> str | None:
    came_back = (read_back.name, read_back.sha256()) if read_back else None
    unread = [entry for entry in entries if (entry["path"], entry["sha256"]) != came_back]
    for entry in unread:
        if from_storage:
            drop_cached_pages(folder / entry["path"])
    return files.first_difference(folder, unread) or why_unreadable(folder, [entry["path"] for entry in entries])
