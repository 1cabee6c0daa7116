"""Who drives a run: a lock that the kernel drops when its holder dies, so a dead head never looks alive."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.paths import RunPaths


@contextmanager
def hold_head(run: RunPaths) -> Iterator[None]:
    """Drive a run: hold its head lock.

    Raises:
        RunBusyError: another live process holds it.
        StorageError: the lock file can't be written.
    """
    try:
        file = run.head_lock.open("a+")
    except OSError as error:
        raise StorageError(f"{run.head_lock}: can't be written ({error.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(
                f"run {run.run_id}: process {head_pid(run) or '?'} drives it already",
                hint=f"hlatctl status {run.run_id}",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def head_pid(run: RunPaths) -> int | None:
    """The process that drives a run now, or None if nobody does."""
    try:
        with run.head_lock.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdigit() else 0
            return None
    except OSError:
        return None
