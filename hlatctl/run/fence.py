"""The fence of a run's attempts: processes of an attempt that is over can't write to the run directory any more.

A driver ends all processes of an attempt before it starts the next one. One may still be left: on a node that neither
the cluster nor the driver reaches, or frozen for minutes. The fence is a file with the number of the newest attempt
that is over. The driver writes it; training processes read it before they commit something, and the program of each
node reads it every few seconds.

A process that freezes between the check and the write can still write once. So two attempts never use the same name: a
checkpoint is written to a folder of its attempt and appears complete.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hlatctl.run.errors import RunBusyError, cannot_write
from hlatctl.run.paths import RunPaths, attempt_of

#: How long a read of the file is trusted, unless something is about to be committed.
_LOOK_EVERY_S = 2.0
#: The number has a fixed width, so that a full disk has room for a new one.
_WIDTH = 12


def close(run: RunPaths, attempt: int) -> None:
    """Declare an attempt over, and all before it.

    Raises:
        StorageError: the file can't be written.
    """
    if attempt > _newest_over(run.fence):
        _write(run.fence, attempt)


def _write(path: Path, attempt: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            line = f"{attempt:0{_WIDTH}d}\n".encode()
            os.pwrite(descriptor, line, 0)
            os.ftruncate(descriptor, len(line))  # remaining bytes of a damaged file would make the number unreadable
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from None


def begin(run: RunPaths, attempt: int) -> None:
    """Declare all attempts before a new one over, and the new one not.

    A driver only declares attempts of its journal over, and a new attempt has the next number. So a larger number in
    the file is damage that would end the new attempt and all later ones.

    Raises:
        StorageError: the file can't be written.
    """
    if _newest_over(run.fence) != attempt - 1:
        _write(run.fence, attempt - 1)


class Fence:
    """The check of one process of an attempt before it writes.

    Args:
        attempt: attempt of this process; 0: no attempt, which is never over.
    """

    def __init__(self, run: RunPaths, attempt: int) -> None:
        self.attempt, self._run = attempt, run
        self._over, self._looked_s = 0, -_LOOK_EVERY_S

    def check(self, *, now: bool = False) -> None:
        """Raise an error if the attempt is over.

        Reads one small file, at most once in two seconds unless ``now``.

        Raises:
            RunBusyError: it is over, so this process must not write.
        """
        if self.is_closed(now=now):
            raise RunBusyError(
                f"run {self._run.run_id}: attempt {self.attempt} is over, so this process writes nothing more and ends",
                hint=f"`hlatctl status {self._run.run_id}` shows the newest attempt",
            )

    def is_closed(self, *, now: bool = False) -> bool:
        """Return whether the attempt is over."""
        if self.attempt and (now or time.monotonic() - self._looked_s >= _LOOK_EVERY_S):
            self._over, self._looked_s = _newest_over(self._run.fence), time.monotonic()
        return 0 < self.attempt <= self._over


def of_job(base: Path) -> Fence | None:
    """Return the fence for a job's records, ``RUN/launch/attempt-0001/train``; None: they belong to no attempt."""
    attempt = attempt_of(base.parent.name)
    return Fence(RunPaths(base.parent.parent.parent), attempt) if attempt else None


def _newest_over(path: Path) -> int:
    """Return the newest attempt that is over; 0 if storage doesn't answer, because writing fails there too."""
    try:
        with path.open("rb") as file:
            return int(file.read(_WIDTH + 2))  # one more than the line: a longer file is damaged
    except (OSError, ValueError):
        return 0
