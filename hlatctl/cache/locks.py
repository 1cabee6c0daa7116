"""Locks that compilers leave in a cache, and which of them mean nothing any more.

Neuron's and Inductor's wrappers lock a file with ``flock`` while they compile; the kernel drops that when they die, the
file stays. Where the file alone is the lock, a dead holder makes every later process wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from hlatctl.cache.layout import File, is_lock
from hlatctl.run.locks import try_lock

#: A lock that nobody holds here may be one of another machine, on storage whose locks do not reach here; compilations
#: of this length have not been seen, and if one is, its graph is compiled twice, which harms nothing.
STALE_AFTER_S = 3600.0


def remove_stale(folder: Path, files: Iterable[File]) -> list[str]:
    """Remove the stale locks below a folder; their paths."""
    return [
        file.path for file in files if is_lock(file.path) and _is_old(file) and _free(folder / file.path, remove=True)
    ]


def is_stale(folder: Path, file: File) -> bool:
    """Whether nobody holds a lock, and it is older than an hour."""
    return _is_old(file) and _free(folder / file.path, remove=False)


def _is_old(file: File) -> bool:
    return not file.problem and time.time() - file.mtime_ns / 1e9 > STALE_AFTER_S


def _free(path: Path, *, remove: bool) -> bool:
    """Nobody holds a lock file; if it is to be removed, the lock is ours while it goes."""
    try:
        with path.open("rb") as file:
            free = try_lock(file)
            if free and remove:
                path.unlink()
            return free
    except OSError:  # missing, or this user may not open it
        return False
