"""Locks that compilers leave in a cache, and which of them are stale.

Neuron's and Inductor's wrappers lock a file with ``flock`` while they compile. When they die, the kernel releases the
lock but the file stays. If the file's existence is the lock, later processes would wait forever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from hlatctl.cache.layout import File, is_lock
from hlatctl.run.locks import try_lock

#: A lock that no process holds here may be held on another machine, if the storage does not share locks. No compilation
#: this long has been seen; if one is, its graph is compiled twice, which does no harm.
STALE_AFTER_S = 3600.0


def remove_stale(folder: Path, files: Iterable[File]) -> list[str]:
    """Remove the stale locks below a folder; return their paths."""
    return [
        file.path for file in files if is_lock(file.path) and _is_old(file) and _free(folder / file.path, remove=True)
    ]


def is_stale(folder: Path, file: File) -> bool:
    """Return whether no process holds a lock and it is older than an hour."""
    return _is_old(file) and _free(folder / file.path, remove=False)


def _is_old(file: File) -> bool:
    return not file.problem and time.time() - file.mtime_ns / 1e9 > STALE_AFTER_S


def _free(path: Path, *, remove: bool) -> bool:
    """Return whether no process holds a lock file; it is held here while it is removed."""
    try:
        with path.open("rb") as file:
            free = try_lock(file)
            if free and remove:
                path.unlink()
            return free
    except OSError:  # missing, or this user may not open it
        return False
