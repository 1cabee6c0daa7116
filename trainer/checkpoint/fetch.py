"""Fetching of a checkpoint from the mirror at the start, if the run directory lacks it.

Each rank fetches its share of the files into a temporary folder of the run directory and verifies their checksums on
the way. The folder is then renamed, and restored from like any other checkpoint.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from conf.schema import Config
from conf.training_rules import CheckpointPolicy
from hlatctl.cache import mirror as layout
from hlatctl.cache.layout import File
from hlatctl.cache.objects import Objects, within
from hlatctl.cache.transfer import copy_checked
from hlatctl.run.atomic import fsync, replace_folder
from hlatctl.run.errors import CheckpointError, HlatctlError, StorageError
from hlatctl.run.manifest import MANIFEST, read_manifest, steps_in
from hlatctl.run.paths import RunPaths, step_name
from trainer.backends.base import Backend
from trainer.checkpoint.mirror import share
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.together import Together
from trainer.checkpoint.trust import CheckpointRecords

Chosen = tuple[int, str] | None
#: Tries of each request, with these pauses between them; the packages have tries of their own.
_PAUSES_S = (1.0, 5.0, 15.0)
#: Longest wait for the list of copies: a start doesn't hang on a service that it may not need.
_LIST_S = 120.0


class Fetcher:
    """Fetches newer checkpoints from a run's mirror. All ranks call each method together, from the training thread.

    Args:
        config: of a run with ``checkpoint.mirror_url``.
    """

    def __init__(
        self, config: Config, run: RunPaths, backend: Backend, tiers: Tiers, records: CheckpointRecords
    ) -> None:
        assert config.checkpoint.mirror_url is not None
        self._url, self._run_id = config.checkpoint.mirror_url, run.run_id
        self._policy = CheckpointPolicy(config)
        self._backend, self._tiers, self._records = backend, tiers, records
        self._together = Together(backend, self._url, lambda: math.inf)  # recovery.start_timeout_s is the limit

    def choose(self, choose: Callable[[], Chosen], max_step: int | None) -> tuple[Chosen, list[int]]:
        """Return the checkpoint to restore, after fetching it if the mirror has a newer one; and steps to copy there.

        Only rank 0's steps count.

        Args:
            choose: returns the newest valid checkpoint of the run directory, on all ranks.
            max_step: ignore newer checkpoints; their copies belong to a course that was given up, and stop counting.

        Raises:
            CheckpointError: checkpoints were written and none is valid, here or there.
            StorageError: the run directory has no checkpoint, and whether the mirror has one is not known.
        """
        failure: CheckpointError | None = None
        chosen: Chosen = None
        try:
            chosen = choose()
        except CheckpointError as error:
            failure = error
        newest = chosen[0] if chosen else -1
        listed = self._together.on_rank0(lambda: self._listed(needed=chosen is None, max_step=max_step))
        copies = [layout.Copy(step, identity) for step, identity in listed]
        for copy in copies:
            if copy.step > newest and self._fetch(copy):
                chosen, failure = choose(), None
                break
        if failure:
            raise failure
        return chosen, self._unmirrored(chosen, {copy.step for copy in copies})

    def _unmirrored(self, chosen: Chosen, there: set[int]) -> list[int]:
        """Return the steps to copy to the mirror: the one that is restored, and lasting ones that were missed."""
        if self._backend.rank != 0:
            return []
        valid = [step for step in steps_in(self._tiers.shared) if self._records.is_verified(step)]
        missed = [step for step in valid if self._policy.is_lasting(step) and chosen and step < chosen[0]]
        return [step for step in (*missed, *(chosen[:1] if chosen else ())) if step not in there]

    def _listed(self, *, needed: bool, max_step: int | None) -> list[tuple[int, str]]:
        """Return step and identity of the run's complete copies, newest first. Only rank 0."""
        try:
            copies = within(_LIST_S, lambda: self._copies(max_step))
        except Exception as error:  # whatever the service's own library raises
            why = f"checkpoint.mirror_url={self._url}: can't be read ({type(error).__name__}: {error})"
            if needed:
                hint = f"repair the access, then `hlatctl resume {self._run_id}`"
                message = f"{why}, so whether it has a checkpoint to continue from is not known"
                raise StorageError(message, hint=hint) from None
            self._records.note("alarm", durable=True, step=0, what="mirror", message=why)
            return []
        return [(copy.step, copy.identity) for copy in copies if self._records.may_be(copy.step, copy.is_of)]

    def _copies(self, max_step: int | None) -> list[layout.Copy]:
        """Return the complete copies up to a step. Later ones stop counting."""
        mirror = layout.mirror_of(self._url, self._run_id)
        copies = _patiently(lambda: layout.complete_copies(mirror))
        later = [copy for copy in copies if max_step is not None and copy.step > max_step]
        for copy in later:
            mirror.delete(copy.manifest)
        return [copy for copy in copies if copy not in later]

    def _fetch(self, copy: layout.Copy) -> bool:
        """Fetch a checkpoint into the run directory; return whether it is complete there."""
        started_s, partial = time.monotonic(), self._tiers.partial(copy.step)
        try:
            files = self._together.on_rank0(lambda: self._begin(copy, partial))
            self._together.everywhere(lambda: self._fetch_share(copy, files, partial))
        except HlatctlError as error:  # on every rank
            if self._backend.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                message = f"checkpoint.mirror_url={self._url}: {copy.name} can't be fetched ({error.message[:500]})"
                self._records.note("alarm", durable=True, step=copy.step, what="mirror", message=message)
            return False
        self._together.on_rank0(lambda: self._commit(copy, partial, time.monotonic() - started_s))
        return True

    def _begin(self, copy: layout.Copy, partial: Path) -> list[dict[str, Any]]:
        """Create the temporary folder with the manifest; return the files to fetch."""
        mirror = layout.mirror_of(self._url, self._run_id)
        content = _patiently(lambda: mirror.read(copy.manifest))
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / MANIFEST).write_bytes(content)
        manifest = read_manifest(partial)
        if layout.Copy.of(manifest) != copy:
            raise CheckpointError(f"{MANIFEST}: belongs to another checkpoint")
        outside = [entry["path"] for entry in manifest.files if not _is_inside(entry["path"])]
        if outside:
            raise CheckpointError(f"{MANIFEST}: {outside[0]}: lies outside the checkpoint")
        return manifest.files

    def _fetch_share(self, copy: layout.Copy, files: list[dict[str, Any]], partial: Path) -> None:
        """Fetch this rank's files, and verify their checksums on the way."""
        mirror = layout.mirror_of(self._url, self._run_id)
        for entry in share(files, self._backend.rank, self._backend.world_size):
            _patiently(functools.partial(_fetch_file, mirror, copy, entry, partial))

    def _commit(self, copy: layout.Copy, partial: Path, wall_s: float) -> None:
        fsync(partial / MANIFEST)
        fsync(partial)
        self._tiers.check()
        folder = replace_folder(partial, self._tiers.shared / step_name(copy.step))
        manifest = read_manifest(folder)
        url = f"{self._url.rstrip('/')}/{self._run_id}/{copy.name}"
        self._records.note("checkpoint_fetched", step=copy.step, bytes=manifest.size_bytes, wall_s=wall_s, url=url)
        self._records.committed(copy.step, manifest.sha256)


def _fetch_file(mirror: Objects, copy: layout.Copy, entry: dict[str, Any], partial: Path) -> None:
    target = partial / entry["path"]
    target.parent.mkdir(parents=True, exist_ok=True)
    source = File(f"{copy.name}/{entry['path']}", int(entry["bytes"]))
    copy_checked(mirror, source, target, entry["sha256"])
    fsync(target)


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and os.fspath(parts) not in ("", ".")


def _patiently(request: Callable[[], Any]) -> Any:
    """Return what a request returns, after some more tries if it fails."""
    for pause_s in _PAUSES_S:
        try:
            return request()
        except Exception:  # whatever the service's own library raises
            time.sleep(pause_s)
    return request()
