"""Copy verified checkpoints to object storage during training, and fetch them from there at the start.

Copying: each process has a thread that copies its share of a checkpoint's files from the run directory. Rank 0 then
waits until the storage lists every file, and copies the manifest last. Training never waits for this thread, so slow or
failing storage only delays the copies.

Costs at 2,048 ranks: one small exchange for each checkpoint, two requests for each file, and rank 0's listings: one
request for 1,000 files, every 1 to 15 s while it waits for the other ranks.

Fetching: if the run directory lacks a checkpoint, each rank fetches its share of the files into a temporary folder of
the run directory and verifies their checksums while reading. The folder is then renamed, and restored from like any
other checkpoint.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from conf.schema import Config
from conf.training_rules import CheckpointPolicy
from hlatctl.cache import remote as layout
from hlatctl.cache.graphs import copy_checked
from hlatctl.cache.store import File, Objects, within
from hlatctl.run.checkpoint import MANIFEST, Manifest, read_manifest, steps_in
from hlatctl.run.errors import CheckpointError, HlatctlError, StorageError
from hlatctl.run.files import fsync, replace_folder
from hlatctl.run.paths import RunPaths, step_name
from trainer.backends.base import Member
from trainer.checkpoint.together import Together
from trainer.checkpoint.trust import CheckpointRecords, Tiers

#: Pause after the first failure; it doubles up to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0
#: Consecutive failures before the alarm.
_ALARM_AFTER = 3
#: Intervals at which rank 0 checks what the other ranks have copied.
_FIRST_LOOK_S, _LAST_LOOK_S = 1.0, 15.0
#: The end of a run stops waiting for its last copy after this long without progress.
_PATIENCE_S = 600.0
#: Interval of events during that wait; far below ``recovery.hang_floor_s``, so that the wait does not count as a hang.
_TELL_EVERY_S = 60.0
_POLL_S = 0.1


class _GoneError(Exception):
    """The checkpoint is not in the run directory any more."""


class Uploader:
    """This process's part in copying a run's checkpoints. Nothing here raises a failure of the storage."""

    def __init__(self, config: Config, run: RunPaths, backend: Member, records: CheckpointRecords) -> None:
        assert config.checkpoint.remote_url is not None
        self._url, self._keep = config.checkpoint.remote_url, config.checkpoint.remote_keep
        self._run, self._backend, self._records = run, backend, records
        self._policy = CheckpointPolicy(config)
        self._sent_config: Path | None = None
        self._changed = threading.Condition()
        self._queue: list[int] = []  # steps whose share this process still has to copy; on rank 0: steps to complete
        self._done: set[int] = set()  # rank 0's: complete, or no longer copied
        self._offered_s: dict[int, float] = {}
        self._working = self._closed = False
        self._failure, self._failures, self._alarmed = "", 0, False
        self._moved_s = time.monotonic()
        self._remote: Objects | None = None
        self._complete: set[layout.Copy] | None = None
        self._newest: layout.Copy | None = None
        self._thread: threading.Thread | None = None

    def offer(self, steps: list[int]) -> None:
        """Queue these checkpoints. All ranks call this from their writing threads; only rank 0's list counts.

        Incomplete earlier checkpoints are dropped from the queue, except the one that is being copied and lasting ones.
        """
        queue = self._queue_with(steps) if self._backend.rank == 0 else None
        replies = self._backend.gather_beside([queue, self._failure])
        for rank, (_, failure) in enumerate(replies):
            if failure and self._backend.rank == 0:
                self._alarm(f"rank {rank}: {failure}")
        with self._changed:
            self._queue = [step for step in replies[0][0] if step not in self._done]
            for step in self._queue:
                self._offered_s.setdefault(step, time.monotonic())
            self._working = self._working or bool(self._queue)
            self._moved_s = time.monotonic()
            self._changed.notify_all()
        if self._queue and self._thread is None:
            # A daemon thread, because a process that fails or is told to stop must not wait for it.
            self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
            self._thread.start()

    def reconfigure(self, config: Config) -> None:
        """Apply a new number of copies and new milestones, while another thread copies."""
        self._keep, self._policy = config.checkpoint.remote_keep, CheckpointPolicy(config)

    def finish(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait at the end of a run until this process has copied everything, unless there is no more progress."""
        told_s = time.monotonic()
        while self._working and not is_asked_to_stop():
            now_s = time.monotonic()
            if now_s - self._moved_s > _PATIENCE_S:
                self._give_up(self._failure or "the storage does not answer")
                return
            if now_s - told_s > _TELL_EVERY_S:
                told_s, step = now_s, next(iter(self._queue), 0)
                self._records.note("upload_waiting", step=step, url=self._url, message=self._failure)
            with self._changed:
                self._changed.wait(_POLL_S)

    def _give_up(self, why: str) -> None:
        step = next(iter(self._queue), 0)
        message = (
            f"checkpoint.remote_url={self._url}: the run ends without its last copy, because nothing was copied for "
            f"{_PATIENCE_S:g} s ({why})"
        )
        self._note("alarm", durable=True, step=step, what="remote_copy", message=message)

    def close(self) -> None:
        """Stop copying after the current file. The next attempt continues."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _queue_with(self, steps: list[int]) -> list[int]:
        with self._changed:
            begun = self._queue[:1] if self._thread else []
            lasting = [step for step in self._queue if self._policy.is_lasting(step)]
            return list(dict.fromkeys([*begun, *sorted(steps, reverse=True), *lasting]))

    def _work(self) -> None:
        while (step := self._next()) is not None:
            try:
                self._copy(step)
            except _GoneError:
                if self._backend.rank == 0:
                    self._alarm(f"the checkpoint of step {step} was deleted before it was copied")
            except Exception as error:  # any error of the service's own library
                self._failed(step, error)
                continue
            self._failure, self._failures = "", 0
            with self._changed:
                if self._backend.rank == 0:
                    self._done.add(step)
                self._queue = [other for other in self._queue if other != step]
            if self._backend.rank == 0:
                self._tidy()
            with self._changed:
                self._working = bool(self._queue)
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue[0]

    def _copy(self, step: int) -> None:
        folder = self._run.checkpoint(step)
        remote = self._connected()
        manifest = _manifest(folder)
        copy = layout.Copy.of(manifest)
        for entry in share(manifest.files, self._backend.rank, self._backend.world_size):
            self._put(remote, folder, copy, entry)
        if self._backend.rank == 0 and not self._closed:
            self._conclude(remote, folder, copy, manifest)

    def _connected(self) -> Objects:
        if self._remote is None:
            self._remote = layout.remote_folder(self._url, self._run.run_id)
        return self._remote

    def _put(self, remote: Objects, folder: Path, copy: layout.Copy, entry: dict[str, Any]) -> None:
        path = f"{copy.name}/{entry['path']}"
        if self._closed or remote.size(path) == entry["bytes"]:
            return
        try:
            remote.put(folder / entry["path"], path, self._moved)
        except FileNotFoundError:
            _manifest(folder)
            raise
        self._moved()

    def _conclude(self, remote: Objects, folder: Path, copy: layout.Copy, manifest: Manifest) -> None:
        """Wait for the other ranks' files, copy the manifest, and delete copies that are no longer needed."""
        look_s, known = _FIRST_LOOK_S, -1
        while (present := _present(remote, copy, manifest)) < len(manifest.files):
            if present != known:
                known = present
                self._moved()
            self._pause(look_s)
            if self._closed:
                return
            _manifest(folder)
            look_s = min(_LAST_LOOK_S, 1.5 * look_s)
        config = self._run.newest_config
        if remote.size(layout.CONFIG) is None or config not in (self._run.config, self._sent_config):
            remote.put(config, layout.CONFIG)
            self._sent_config = config
        if remote.size(copy.manifest) is None:
            remote.put(folder / MANIFEST, copy.manifest)
            wall_s = time.monotonic() - self._offered_s.get(copy.step, time.monotonic())
            url = remote.at(copy.name)
            self._note("checkpoint_uploaded", step=copy.step, bytes=manifest.size_bytes, wall_s=wall_s, url=url)
        self._alarmed, self._newest = False, copy

    def _tidy(self) -> None:
        """Delete incomplete copies that no process continues, and complete ones that need not be kept."""
        try:
            if self._remote and self._newest:
                self._keep_only_needed(self._remote, self._newest)
        except Exception as error:  # any error of the service's own library
            self._alarm(f"copies that are not needed can't be deleted ({type(error).__name__}: {error})")

    def _keep_only_needed(self, remote: Objects, newest: layout.Copy) -> None:
        if self._complete is None:
            self._complete = set(layout.complete_copies(remote))
        self._complete.add(newest)
        kept = {*sorted(self._complete)[-self._keep :], newest}
        kept |= {copy for copy in self._complete if self._policy.is_lasting(copy.step)}
        for copy in layout.all_copies(remote):
            if copy not in kept and copy.step not in self._queue:
                layout.delete(remote, copy)
        self._complete = kept

    def _failed(self, step: int, error: Exception) -> None:
        self._failures += 1
        self._failure = f"step {step}: {type(error).__name__}: {error}"[:500]
        if self._failures == _ALARM_AFTER and self._backend.rank == 0:
            self._alarm(self._failure)
        self._pause(min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._failures - 1)))

    def _alarm(self, why: str) -> None:
        """Journal an alarm, only once until a checkpoint is complete in the remote folder."""
        if not self._alarmed:
            self._alarmed = True
            message = f"checkpoint.remote_url={self._url}: {why}"
            step = self._queue[0] if self._queue else 0
            self._note("alarm", durable=True, step=step, what="remote_copy", message=message)

    def _note(self, kind: str, **fields: Any) -> None:
        with self._changed:
            if not self._closed:  # the journal may be closed too
                self._records.note(kind, **fields)

    def _moved(self) -> None:
        self._moved_s = time.monotonic()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)


def share(files: list[dict[str, Any]], rank: int, world_size: int) -> list[dict[str, Any]]:
    """Return the files of a manifest that a rank copies: distributed by size, so that shares are about equal."""
    return sorted(files, key=lambda entry: (-int(entry["bytes"]), str(entry["path"])))[rank::world_size]


def _present(remote: Objects, copy: layout.Copy, manifest: Manifest) -> int:
    sizes = remote.sizes(copy.name)
    return sum(sizes.get(entry["path"]) == entry["bytes"] for entry in manifest.files)


def _manifest(folder: Path) -> Manifest:
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        if not os.path.lexists(folder / MANIFEST):
            raise _GoneError from None
        raise error


Chosen = tuple[int, str] | None
#: Pauses between the tries of each request; the packages also retry.
_PAUSES_S = (1.0, 5.0, 15.0)
#: Longest wait for the list of copies: a start must not hang on a service that it may not need.
_LIST_S = 120.0


class Fetcher:
    """Fetches newer checkpoints from a run's remote folder. All ranks call each method, from the training thread."""

    def __init__(
        self, config: Config, run: RunPaths, backend: Member, tiers: Tiers, records: CheckpointRecords
    ) -> None:
        assert config.checkpoint.remote_url is not None
        self._url, self._run_id = config.checkpoint.remote_url, run.run_id
        self._policy = CheckpointPolicy(config)
        self._backend, self._tiers, self._records = backend, tiers, records
        self._together = Together(backend, self._url, lambda: math.inf)  # recovery.start_timeout_s is the limit

    def choose(self, choose: Callable[[], Chosen], max_step: int | None) -> tuple[Chosen, list[int]]:
        """Return the checkpoint to restore, fetched if the remote folder has a newer one, and the steps to upload.

        Only rank 0's steps count.

        Args:
            choose: returns the newest valid checkpoint of the run directory, on all ranks.
            max_step: ignore newer checkpoints; their copies were abandoned by a rollback, and stop counting.

        Raises:
            CheckpointError: checkpoints were written and none is valid, here or there.
            StorageError: the run directory has no checkpoint, and it is unknown whether the remote folder has one.
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
        return chosen, self._not_uploaded(chosen, {copy.step for copy in copies})

    def _not_uploaded(self, chosen: Chosen, there: set[int]) -> list[int]:
        """Return the steps to upload: the one that is restored, and lasting ones that were missed."""
        if self._backend.rank != 0:
            return []
        valid = [step for step in steps_in(self._tiers.shared) if self._records.is_verified(step)]
        missed = [step for step in valid if self._policy.is_lasting(step) and chosen and step < chosen[0]]
        return [step for step in (*missed, *(chosen[:1] if chosen else ())) if step not in there]

    def _listed(self, *, needed: bool, max_step: int | None) -> list[tuple[int, str]]:
        """Return step and identity of the run's complete copies, newest first. Only rank 0 calls this."""
        try:
            copies = within(_LIST_S, lambda: self._copies(max_step))
        except Exception as error:  # any error of the service's own library
            why = f"checkpoint.remote_url={self._url}: can't be read ({type(error).__name__}: {error})"
            if needed:
                hint = f"repair the access, then `hlatctl resume {self._run_id}`"
                message = f"{why}, so whether it has a checkpoint to continue from is not known"
                raise StorageError(message, hint=hint) from None
            self._records.note("alarm", durable=True, step=0, what="remote_copy", message=why)
            return []
        return [(copy.step, copy.identity) for copy in copies if self._records.may_be(copy.step, copy.is_of)]

    def _copies(self, max_step: int | None) -> list[layout.Copy]:
        """Return the complete copies up to a step. Later ones stop counting."""
        remote = layout.remote_folder(self._url, self._run_id)
        copies = _patiently(lambda: layout.complete_copies(remote))
        later = [copy for copy in copies if max_step is not None and copy.step > max_step]
        for copy in later:
            remote.delete(copy.manifest)
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
                message = f"checkpoint.remote_url={self._url}: {copy.name} can't be fetched ({error.message[:500]})"
                self._records.note("alarm", durable=True, step=copy.step, what="remote_copy", message=message)
            return False
        self._together.on_rank0(lambda: self._commit(copy, partial, time.monotonic() - started_s))
        return True

    def _begin(self, copy: layout.Copy, partial: Path) -> list[dict[str, Any]]:
        remote = layout.remote_folder(self._url, self._run_id)
        content = _patiently(lambda: remote.read(copy.manifest))
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
        remote = layout.remote_folder(self._url, self._run_id)
        for entry in share(files, self._backend.rank, self._backend.world_size):
            _patiently(functools.partial(_fetch_file, remote, copy, entry, partial))

    def _commit(self, copy: layout.Copy, partial: Path, wall_s: float) -> None:
        fsync(partial / MANIFEST)
        fsync(partial)
        self._tiers.check()
        folder = replace_folder(partial, self._tiers.shared / step_name(copy.step))
        manifest = read_manifest(folder)
        url = f"{self._url.rstrip('/')}/{self._run_id}/{copy.name}"
        self._records.note("checkpoint_fetched", step=copy.step, bytes=manifest.size_bytes, wall_s=wall_s, url=url)
        self._records.committed(copy.step, manifest.sha256)


def _fetch_file(remote: Objects, copy: layout.Copy, entry: dict[str, Any], partial: Path) -> None:
    target = partial / entry["path"]
    target.parent.mkdir(parents=True, exist_ok=True)
    source = File(f"{copy.name}/{entry['path']}", int(entry["bytes"]))
    copy_checked(remote, source, target, entry["sha256"])
    fsync(target)


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and os.fspath(parts) not in ("", ".")


def _patiently(request: Callable[[], Any]) -> Any:
    for pause_s in _PAUSES_S:
        try:
            return request()
        except Exception:  # any error of the service's own library
            time.sleep(pause_s)
    return request()
