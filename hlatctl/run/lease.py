"""Leases: file locks that keep two processes from driving the same run or doing the same evaluation.

The content of a lock file names the holder for other processes. Only the lock itself decides who holds it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hlatctl.run.errors import RunBusyError
from hlatctl.run.locks import locked_file, try_lock
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED, open_regular, parse_json

_POLL_S = 0.2
#: More than a lock file contains.
_MAX_CHARS = 1000
_PID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The holder of a lease, as named in its file."""

    pid: int
    host: str
    since_unix_s: float

    def __str__(self) -> str:
        """Return text for messages."""
        return f"process {self.pid or '?'} on {self.host or 'an unknown host'}"


@contextmanager
def hold_driver(run: RunPaths) -> Iterator[None]:
    """Hold the lock of a run's driver.

    Raises:
        RunBusyError: another live process holds it.
        StorageError: the lock file can't be written.
    """

    def refuse() -> None:
        raise RunBusyError(
            f"run {run.run_id}: process {driver_pid(run) or '?'} is already driving it",
            hint=f"`hlatctl status {run.run_id}` shows the run's state",
        )

    with _locked(run.driver_lock, str(os.getpid()), refuse):
        yield


def driver_pid(run: RunPaths) -> int | None:
    """Return the id of the process that drives a run; 0 if it is unknown, None if no process does."""
    text = _read_if_held(run.driver_lock)
    return None if text is None else int(text) if _PID.fullmatch(text) else 0


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    return _read_if_held(path) is not None


def wait_until_undriven(run: RunPaths, wait_s: float) -> None:
    """Wait until no process drives a run or a sweep, but at most ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while driver_pid(run) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


@contextmanager
def hold(path: Path, when_busy: Callable[[Holder], None]) -> Iterator[None]:
    """Hold the lease of a file.

    Args:
        path: of the lock file.
        when_busy: called with the holder while another process holds it. It raises to give up, or waits and returns
            to try again.

    Raises:
        StorageError: the file can't be written.
    """
    own = Holder(pid=os.getpid(), host=platform.node(), since_unix_s=time.time())
    with _locked(path, json.dumps(asdict(own)), lambda: when_busy(holder(path) or _UNKNOWN)):
        yield


def holder(path: Path) -> Holder | None:
    """Return the holder of a lease, or None if no process holds it."""
    text = _read_if_held(path)
    if text is None:
        return None
    try:
        record = parse_json(text)
        return Holder(pid=int(record["pid"]), host=str(record["host"]), since_unix_s=float(record["since_unix_s"]))
    except DAMAGED:
        return _UNKNOWN  # it has the lock but has not written its name yet


_UNKNOWN = Holder(pid=0, host="", since_unix_s=0.0)


@contextmanager
def _locked(path: Path, text: str, when_busy: Callable[[], None]) -> Iterator[None]:
    with locked_file(path, when_busy) as file:
        with suppress(OSError):  # a full disk: the lock is held all the same
            file.truncate(0)
            file.write(text.encode())
        yield


def _read_if_held(path: Path) -> str | None:
    """Return the content of a lock file, or None if no process holds it."""
    try:
        with open(path, errors="replace", opener=open_regular) as file:
            return None if try_lock(file, shared=True) else file.read(_MAX_CHARS).strip()
    except OSError:
        return None
