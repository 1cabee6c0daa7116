"""What can be deleted from caches: caches that no run has used for long, and leftovers of interrupted work."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hlatctl.cache import locks
from hlatctl.cache.layout import MANIFEST, is_lock, modules
from hlatctl.cache.store import Folder
from hlatctl.cache.verify import QUARANTINE
from hlatctl.run.errors import StorageError

#: Unfinished work of this age is abandoned.
_ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True)
class Waste:
    """Something that can be deleted.

    Args:
        path: a folder or a file.
        bytes: its size.
        why: the reason, in words.
    """

    path: Path
    bytes: int
    why: str


def caches(root: Path) -> list[Path]:
    """Return the caches below a folder that has one per fingerprint."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def find(root: Path, last_used_unix_s: dict[str, float], *, unused_for_s: float) -> list[Waste]:
    """Return what can be deleted below a folder of caches.

    Args:
        root: has one cache per fingerprint.
        last_used_unix_s: by fingerprint, from the runs; writing a cache also counts as using it.
        unused_for_s: a cache that was not used for this long is deleted as a whole.
    """
    now = time.time()
    waste = [
        Waste(path, _size(path), "left by an interrupted compilation")
        for path in (root.iterdir() if root.is_dir() else ())
        if path.name.endswith(".partial") and now - path.stat().st_mtime > _ABANDONED_AFTER_S
    ]
    for cache in caches(root):
        written = (cache / MANIFEST if (cache / MANIFEST).exists() else cache).stat().st_mtime
        idle_s = now - max(written, last_used_unix_s.get(cache.name, 0.0))
        if idle_s > unused_for_s:
            waste.append(Waste(cache, _size(cache), f"no run has used it for {idle_s / 86400:.0f} days"))
        else:
            waste += _leftovers(cache, now)
    return waste


def remove(wasted: list[Waste]) -> None:
    """Delete files and folders.

    Raises:
        StorageError: something can't be deleted.
    """
    for each in wasted:
        try:
            if each.path.is_dir() and not each.path.is_symlink():
                shutil.rmtree(each.path)
            else:
                each.path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{each.path}: can't be deleted ({error.strerror})") from None


def _leftovers(cache: Path, now: float) -> Iterator[Waste]:
    listing = Folder(cache).files()
    if (cache / QUARANTINE).is_dir():
        yield Waste(cache / QUARANTINE, _size(cache / QUARANTINE), "modules that were moved aside")
    for file in listing:
        if is_lock(file.path) and not file.path.startswith(".") and locks.is_stale(cache, file):
            yield Waste(cache / file.path, file.bytes, "a lock that nobody holds")
    for module in modules(listing):
        newest_s = max(file.mtime_ns for file in module.files) / 1e9
        if module.problem and now - newest_s > _ABANDONED_AFTER_S:
            for file in module.files:
                yield Waste(cache / file.path, file.bytes, module.problem)


def _size(path: Path) -> int:
    return sum(file.bytes for file in Folder(path).files()) if path.is_dir() else path.lstat().st_size
