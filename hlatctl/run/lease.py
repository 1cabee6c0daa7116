"""Who does what alone: locks that the kernel drops when their holder dies, so a dead process never looks alive.

One is for driving a run, one for each evaluation, so that no two processes do the same work. What a lock file says
tells others who holds it; only the lock itself counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hlatctl.run.errors import RunBusyError, cannot_write
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED, open_regular, parse_json

_POLL_S = 0.2
#: More than a lock file ever says.
_MAX_CHARS = 1000
_PID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease, as far as its file says."""

    pid: int
    host: str
    since_unix_s: float

    def __str__(self) -> str:
        """In words."""
        return f"process {self.pid or '?'} on {self.host or 'an unknown host'}"


@contextmanager
def hold_driver(run: RunPaths) -> Iterator[None]:
    """Drive a run: hold its head lock.

    Raises:
        RunBusyError: another live process holds it.
        StorageError: the lock file can't be written.
    """

    def refuse() -> None:
        raise RunBusyError(
            f"run {run.run_id}: process {driver_pid(run) or '?'} drives it already", hint=f"hlatctl status {run.run_id}"
        ) from None

    with _locked(run.driver_lock, str(os.getpid()), refuse):
        yield


def driver_pid(run: RunPaths) -> int | None:
    """The process that drives a run now, or None if nobody does."""
    text = _read_if_held(run.driver_lock)
    return None if text is None else int(text) if _PID.fullmatch(text) else 0


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock that a file stands for."""
    return _read_if_held(path) is not None


def wait_until_undriven(run: RunPaths, wait_s: float) -> None:
    """Wait until no process drives a run, or a sweep, any more; at most so long."""
    deadline = time.monotonic() + wait_s
    while driver_pid(run) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


@contextmanager
def hold(path: Path, when_busy: Callable[[Holder], None]) -> Iterator[None]:
    """Hold the lease that a file stands for.

    Args:
        path: of the lock file, which tells others who holds it.
        when_busy: told who holds it; raises to give up, or returns after a while to try again.

    Raises:
        StorageError: the file can't be written.
    """
    own = Holder(pid=os.getpid(), host=platform.node(), since_unix_s=time.time())
    with _locked(path, json.dumps(asdict(own)), lambda: when_busy(holder(path) or _UNKNOWN)):
        yield


def holder(path: Path) -> Holder | None:
    """Who holds a lease now, or None if nobody does."""
    text = _read_if_held(path)
    if text is None:
        return None
    try:
        record = parse_json(text)
        return Holder(pid=int(record["pid"]), host=str(record["host"]), since_unix_s=float(record["since_unix_s"]))
    except DAMAGED:
        return _UNKNOWN  # it has the lock and has not said yet who it is


_UNKNOWN = Holder(pid=0, host="", since_unix_s=0.0)


@contextmanager
def _locked(path: Path, text: str, when_busy: Callable[[], None]) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                when_busy()
        with suppress(OSError):  # a full disk: what the file says only informs, the lock counts
            file.truncate(0)
            file.write(text.encode())
        yield


def _read_if_held(path: Path) -> str | None:
    """What a lock file says if somebody holds it; None if nobody does."""
    try:
        with open(path, errors="replace", opener=open_regular) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(_MAX_CHARS).strip()
            return None
    except OSError:
        return None
