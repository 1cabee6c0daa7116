"""Private folders for temporary files, which are removed even if their owner is killed: at once, or by the next one.

A folder is locked as long as its owner lives, and the kernel drops the lock with the owner. So one that is not locked
was left behind. systemd-tmpfiles, too, leaves a locked folder alone however old its files are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hlatctl.run.locks import lock_folder, remove_unlocked

#: Names the private folder of a job for its processes.
JOB_FOLDER_ENV = "HLATCTL_JOB_FOLDER"

#: Of every folder made here, and of nothing else: what bears it may be removed.
_PREFIX = "hlatctl-tmp-"


@dataclass(frozen=True)
class Scratch:
    """A private folder.

    Args:
        path: of mode 0700; short, because paths of sockets lie below it.
        lock: its lock's descriptor; a child process that inherits it keeps the folder as well.
    """

    path: Path
    lock: int


@contextmanager
def private_folder(kind: str, *, within: str | None = None) -> Iterator[Scratch]:
    """Make a private folder, which is removed at the end, and remove those that dead processes have left.

    Args:
        kind: what it is for; part of its name.
        within: the folder to make it in; the system's folder for temporary files by default.
    """
    parent = Path(within or tempfile.gettempdir())
    _sweep(parent)
    made = _make(parent, kind)
    try:
        yield made
    finally:
        shutil.rmtree(made.path, ignore_errors=True)
        os.close(made.lock)


def _make(parent: Path, kind: str) -> Scratch:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=parent))
        lock = lock_folder(path)
        if lock is not None and path.is_dir():
            return Scratch(path, lock)
        if lock is not None:  # another process swept it before it was locked
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what dead processes of this user have left. Links, and what others own, are not touched."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            remove_unlocked(Path(entry.path))
