"""Copy a cache to a worker's own disk: in parallel, only complete modules, verified, each module atomically.

Files that are in place and equal are kept, so a warm-up that was killed continues where it stopped. Files are written
without fsync: a manifest from before the last boot is not trusted, so after a power cut everything is verified again.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hlatctl.cache import graphs
from hlatctl.cache.graphs import BrokenError, Entry, copy_checked, move_aside, sha256_of
from hlatctl.cache.store import INDUCTOR, MANIFEST, File, Folder, Module, Store, modules
from hlatctl.cache.trust import make_private
from hlatctl.run.errors import StorageError, cannot_write
from hlatctl.run.lease import Holder, hold

#: In a cache: files being copied, and the lock of the process that fills it.
COPYING, _LOCK = ".copy", ".warm.lock"
#: More than the cores, because a shared file system has a high latency.
_THREADS = 16
_WAIT_S = 0.2


@dataclass
class Warmed:
    """The result of a warm-up.

    Args:
        modules: number of complete modules in place now.
        copied: how many of these this call copied.
        copied_bytes: size of the copied modules.
        skipped: the source's incomplete modules, as ``name: reason``.
        quarantined: damaged modules of the target, which were moved aside.
        stale_locks: locks that were removed from the target.
    """

    modules: int = 0
    copied: int = 0
    copied_bytes: int = 0
    skipped: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    stale_locks: list[str] = field(default_factory=list)


def warm(source: Store, target: Path) -> Warmed:
    """Copy every complete module of a store that is missing or different in a folder.

    If several processes fill one folder, the others wait for the first one and then have nothing to do.

    Raises:
        StorageError: the source has no complete module, or broken ones (all others are in place then); the target can't
            be written; another user could have written to either.
    """
    source.require_trusted()
    wanted, expected = _wanted(source)
    done, problems = Warmed(), []
    done.skipped = [f"{module.name}: {module.problem}" for module in wanted if module.problem]
    complete = [module for module in wanted if not module.problem]
    if not complete:
        first = f"; the first: {done.skipped[0]}" if done.skipped else ""
        raise StorageError(
            f"{source.name}: contains no complete module ({len(done.skipped)} incomplete{first})",
            hint="compile first; `hlatctl cache ls` lists the caches",
        )
    make_private(target)
    with hold(target / _LOCK, _wait), _write_errors(target):
        there = _swept(target, done)
        entries, trusted = graphs.read_own_manifest(target)
        copier = _Copier(source, target, expected, there, entries, done)
        missing = [module for module in complete if not (trusted and copier.has(module))]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="warm") as pool:
            problems = [problem for problem in pool.map(copier.copy, missing) if problem]
        if missing or not trusted:
            known = {path: entry for path, entry in entries.items() if path in there}
            graphs.write_entries(target, {**known, **copier.entries}.values())
        shutil.rmtree(target / COPYING, ignore_errors=True)
    done.modules = len(complete) - len(problems)
    if problems:
        raise StorageError(
            f"{source.name}: {len(problems)} of {len(complete)} modules are broken, and were not copied: {problems[0]}",
            hint=f"`hlatctl cache verify {source.name} --quarantine` moves them aside; they are compiled again",
        )
    return done


class _Copier:
    def __init__(
        self,
        source: Store,
        target: Path,
        expected: dict[str, str],
        there: dict[str, File],
        own: dict[str, Entry],
        done: Warmed,
    ) -> None:
        self._source, self._target, self._expected, self._there = source, target, expected, there
        self._own, self._done, self._numbers, self._lock = own, done, itertools.count(), threading.Lock()
        self._folder = Folder(target)
        #: Entries of the files in place, by path.
        self.entries: dict[str, Entry] = {}

    def has(self, module: Module) -> bool:
        return all(self._is_known(file) for file in module.files)

    def _is_known(self, file: File) -> bool:
        here, known = self._there.get(file.path), self._own.get(file.path)
        return (
            here is not None
            and known is not None
            and here.bytes == known["bytes"] == file.bytes
            and here.mtime_ns == known.get("mtime_ns")
            and self._expected.get(file.path) in (None, known["sha256"])
        )

    def copy(self, module: Module) -> str:
        """Copy a module into place; return the reason if it is broken, else an empty string."""
        try:
            kept = self._kept(module)
            missing = [file for file in module.files if file.path not in kept]
            staged = [(file, self._staged(file)) for file in missing]
        except BrokenError as broken:
            return str(broken)
        for file, (path, _) in staged:
            place = self._target / file.path
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
        with self._lock:
            self.entries |= kept | {file.path: entry for file, (_, entry) in staged}
            self._done.copied += bool(missing)
            self._done.copied_bytes += sum(file.bytes for file in missing)
        return ""

    def _kept(self, module: Module) -> dict[str, Entry]:
        kept = {}
        for file in module.files:
            here = self._there.get(file.path)
            if here is None:
                continue
            should_be = self._expected.get(file.path) or self._own.get(file.path, {}).get("sha256")
            sha256 = sha256_of(self._folder, file.path) if here.bytes == file.bytes else "another size"
            if should_be not in (None, sha256) or here.bytes != file.bytes:
                move_aside(self._target, module)
                with self._lock:
                    self._done.quarantined.append(f"{module.name}: {file.path} was damaged or changed")
                return {}
            kept[file.path] = {"path": file.path, "bytes": here.bytes, "sha256": sha256, "mtime_ns": here.mtime_ns}
        return kept

    def _staged(self, file: File) -> tuple[Path, Entry]:
        # One folder per thread: the kernel creates the files of a folder one at a time, and waiting threads spin.
        folder = self._target / COPYING / str(threading.get_ident())
        folder.mkdir(exist_ok=True)
        path = folder / str(next(self._numbers))
        return path, copy_checked(self._source, file, path, self._expected.get(file.path))


def _wanted(source: Store) -> tuple[list[Module], dict[str, str]]:
    """Return the source's modules and checksums, from its manifest if it has one: listing shared storage is slow."""
    entries = graphs.read_manifest(source)
    if entries is not None:
        listed = modules(File(path, int(entry["bytes"])) for path, entry in entries.items())
        return listed, {path: str(entry["sha256"]) for path, entry in entries.items()}
    unlisted = modules(source.files())
    if unlisted and all(module.layout == INDUCTOR for module in unlisted):
        raise StorageError(
            f"{source.name}: has no {MANIFEST}, so the cache is incomplete",
            hint="remove the folder; the next run compiles it again",
        )
    # Inductor's files don't show which belong together: without a manifest they may be incomplete.
    return [module for module in unlisted if module.layout != INDUCTOR], {}


def _swept(target: Path, done: Warmed) -> dict[str, File]:
    shutil.rmtree(target / COPYING, ignore_errors=True)
    listing = Folder(target).files()
    for file in listing:
        if file.problem:
            raise StorageError(f"{target}/{file.path}: {file.problem}", hint="remove it")
    done.stale_locks = graphs.remove_stale(target, listing)
    (target / COPYING).mkdir()
    return {file.path: file for file in listing}


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Raise a StorageError with the folder and a hint if something can't be written."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(target / COPYING, ignore_errors=True)
        hint = "free space there, or set cluster.worker_cache_dir to another local folder; files in place are kept"
        raise cannot_write(target, error, hint=hint) from None


def _wait(_: Holder) -> None:
    time.sleep(_WAIT_S)
