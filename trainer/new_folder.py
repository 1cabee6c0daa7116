"""A folder that appears whole or not at all, and never in the place of another."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.errors import StorageError, cannot_write


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes the target when the block ends without an exception, else it is removed.

    Raises:
        StorageError: the target exists and is not an empty folder, or can't be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StorageError(f"--to={target}: exists and is not an empty folder", hint="name another, or remove it")
    try:
        with partial_folder(target) as partial:
            yield partial
            partial.rename(target)
            files.fsync_dir(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from None


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target to fill and rename; removed at the end unless it was renamed.

    Folders that killed processes have left for the same target are removed first. This process holds a lock on its own
    folder, so no other process takes it for one of those.
    """
    _sweep(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with the same id
    partial.mkdir(parents=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks on folders
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _sweep(target: Path) -> None:
    for left_over in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):  # in use, gone already, or a file system without locks on folders
            lock = os.open(left_over, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left_over)
            finally:
                os.close(lock)
