"""Private folders for temporary files. If the owner is killed, the next process that creates one removes its folder.

A folder is locked as long as its owner lives. The kernel drops the lock when the owner dies, so an unlocked folder is
left over. systemd-tmpfiles also ignores locked folders, however old their files are.
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

#: Prefix of every folder that this module creates, and may therefore remove.
_PREFIX = "hlatctl-tmp-"


@dataclass(frozen=True)
class Scratch:
    """A private folder.

    Args:
        path: of mode 0700; short, because it contains sockets, whose paths are limited.
        lock: its lock's descriptor. A child process that inherits it keeps the folder, too.
    """

    path: Path
    lock: int


@contextmanager
def private_folder(kind: str, *, within: str | None = None) -> Iterator[Scratch]:
    """Create a private folder and remove it at the end. Remove those that dead processes left.

    Args:
        kind: part of its name.
        within: the folder to create it in; None: the system's folder for temporary files.
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
    """Remove folders that dead processes of this user left. Ignore symbolic links."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            remove_unlocked(Path(entry.path))
