"""Leases: file locks that keep two processes from driving the same run or doing the same evaluation.

On one host the lock itself (``flock``) decides who holds a lease, and it ends with its holder. Between hosts of a
shared file system a lock may not be seen, or may outlive a dead host. There the file's content decides: it names the
holder, whose heartbeat is the file's modification time. Clocks of hosts must agree within half of ``_STALE_S``.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from hlatctl.run.errors import RunBusyError, cannot_write
from hlatctl.run.files import DAMAGED, locked_file, open_regular, parse_json, try_lock
from hlatctl.run.paths import RunPaths

_POLL_S = 0.2
#: Interval of heartbeats, and the age at which another host's process may take a lease over.
_BEAT_S, _STALE_S = 5.0, 60.0
#: After this time, two hosts that take over the same lease simultaneously both see which of them wrote last.
_SETTLE_S = 2.0
#: Time for a process that has got a lock to write its name; on a full disk it can't.
_NAMING_S, _NAMING_POLL_S = 1.0, 0.01
#: Maximum bytes read; a lock file contains less.
_MAX_CHARS = 1000


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The holder of a lease, as named in its file."""

    pid: int
    host: str
    since_unix_s: float
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.pid or '?'} on {self.host or 'an unknown host'}"

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is on another host than this process."""
        return self.host not in ("", platform.node())


_UNKNOWN = Holder(pid=0, host="", since_unix_s=0.0)
#: The leases that this process has taken, by the path of the file.
_OWN: dict[Path, Holder] = {}


class _ReplacedError(Exception):
    """Another process has replaced the lock file."""


@contextmanager
def hold_driver(run: RunPaths) -> Iterator[None]:
    """Hold the lock of a run's driver.

    Raises:
        RunBusyError: another live process holds it.
        StorageError: the lock file can't be written.
    """

    def refuse(holder: Holder) -> None:
        hint = f"`hlatctl status {run.run_id}` shows the run's state"
        if holder.is_elsewhere:
            hint += f"; if {holder.host} is dead, try again {_STALE_S:g} s after the driver's last heartbeat"
        by = str(holder) if holder.is_elsewhere else f"process {holder.pid or '?'}"
        raise RunBusyError(f"run {run.run_id}: {by} is already driving it", hint=hint)

    with hold(run.driver_lock, refuse):
        yield


@contextmanager
def hold_evaluator(run: RunPaths) -> Iterator[None]:
    """Hold the lock of the process that evaluates a run alongside its driver.

    Raises:
        RunBusyError: another live process holds it.
        StorageError: the lock file can't be written.
    """

    def refuse(holder: Holder) -> None:
        raise RunBusyError(
            f"run {run.run_id}: {holder} is evaluating it", hint=f"`hlatctl status {run.run_id}` shows the progress"
        )

    with hold(run.evaluator_lock, refuse):
        yield


def successor(run: RunPaths) -> Holder | None:
    """Return the process that took over a run from this driver; None if none did, or if this isn't its driver.

    Reads one small file.
    """
    own = _OWN.get(run.driver_lock)
    named = _named(run.driver_lock) if own else _UNKNOWN
    return named if named.token and named != own else None


def check_driver(run: RunPaths) -> None:
    """Check before each write that no process on a host with separate locks has taken the run over.

    Raises:
        RunBusyError: a process has taken it over.
    """
    if other := successor(run):
        raise RunBusyError(
            f"run {run.run_id}: {other} drives it now; this driver had lost its lease and has stopped writing",
            hint=f"`hlatctl status {run.run_id}` shows the run's state; use storage with locks for runs_dir",
        )


def driver(run: RunPaths) -> Holder | None:
    """Return the process that drives a run, on any host; None if no process does."""
    return holder(run.driver_lock)


def driver_pid(run: RunPaths) -> int | None:
    """Return the id of the process that drives a run; 0 if it is unknown, None if no process does."""
    named = driver(run)
    return None if named is None else named.pid


def driver_token(run: RunPaths) -> str:
    """Return the token that identifies a run's driver among earlier and later ones. Empty if no process drives it."""
    deadline = time.monotonic() + _NAMING_S
    while True:
        named = _OWN.get(run.driver_lock) or driver(run)
        if named is None or named.token or time.monotonic() > deadline:
            return named.token if named else ""
        time.sleep(_NAMING_POLL_S)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    return holder(path) is not None


def wait_until_undriven(run: RunPaths, wait_s: float) -> None:
    """Wait until no process drives a run or a sweep, but at most ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while driver(run) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


@contextmanager
def hold(path: Path, when_busy: Callable[[Holder], None]) -> Iterator[None]:
    """Hold the lease of a file.

    A process that has lost its lease to another host ends itself with SIGTERM. It loses the lease if it was suspended
    for longer than ``_STALE_S``, or couldn't reach the storage.

    Args:
        path: lock file.
        when_busy: called with the holder while another process holds it. It raises to give up, or waits and returns
            to try again.

    Raises:
        StorageError: the file can't be written.
    """
    own = Holder(pid=os.getpid(), host=platform.node(), since_unix_s=time.time(), token=uuid.uuid4().hex)
    while True:
        with suppress(_ReplacedError), locked_file(path, lambda: _when_locked(path, when_busy)) as file:
            if _take(file, path, own, when_busy):
                try:
                    _OWN[path] = own
                    with _beating(path, own):
                        yield
                finally:
                    del _OWN[path]
                    if _named(path) == own:
                        file.truncate(0)
                return


def holder(path: Path) -> Holder | None:
    """Return the holder of a lease, or None if no process holds it."""
    try:
        with open(path, errors="replace", opener=open_regular) as file:
            named = _parse(file.read(_MAX_CHARS))
            if named.is_elsewhere:
                return None if _is_stale(file.fileno()) else named
            return None if try_lock(file, shared=True) else named
    except OSError:
        return None


def _when_locked(path: Path, when_busy: Callable[[Holder], None]) -> None:
    """Call ``when_busy``, or replace a file whose lock the file server still holds for a dead host."""
    named = _named(path)
    if named.is_elsewhere and holder(path) is None:
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            new.touch(mode=path.stat().st_mode & 0o777)
            new.write_text(json.dumps(asdict(named)), encoding="utf-8")
            os.utime(new, (0, 0))
            new.replace(path)
        except OSError as error:
            raise cannot_write(path, error) from None
        raise _ReplacedError
    when_busy(named)


def _take(file: FileIO, path: Path, own: Holder, when_busy: Callable[[Holder], None]) -> bool:
    if not _is_same(file, path):
        return False  # another process replaced it
    before = _named(path)
    if before.is_elsewhere and not _is_stale(file.fileno()):
        when_busy(before)
        return False
    try:
        file.truncate(0)
        file.write(json.dumps(asdict(own)).encode())
    except OSError as error:  # on a full disk, the lock is still held
        if before.is_elsewhere:
            raise cannot_write(path, error) from None
    if before.is_elsewhere:
        time.sleep(_SETTLE_S)
        return _named(path) == own
    return True


@contextmanager
def _beating(path: Path, own: Holder) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_S):
            named = _named(path)
            if named.token and named != own:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _named(path: Path) -> Holder:
    try:
        with open(path, errors="replace", opener=open_regular) as file:
            return _parse(file.read(_MAX_CHARS))
    except OSError:
        return _UNKNOWN


def _parse(text: str) -> Holder:
    try:
        record = parse_json(text)
        return Holder(
            pid=int(record["pid"]),
            host=str(record["host"]),
            since_unix_s=float(record["since_unix_s"]),
            token=str(record.get("token", "")),
        )
    except DAMAGED:
        return _UNKNOWN  # it has the lock but has not written its name yet


def _is_stale(descriptor: int) -> bool:
    return time.time() - os.fstat(descriptor).st_mtime > _STALE_S


def _is_same(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
