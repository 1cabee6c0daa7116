"""Reading a run: its folded state, its configuration and its driver, for everything that shows or copies a run.

Code that needs the events themselves, from a position that it has stored, follows ``journal.JournalTail``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Self, TypeVar

from hlatctl.run import lease
from hlatctl.run.errors import HlatctlError, StorageError
from hlatctl.run.fold import apply, follow
from hlatctl.run.journal import Event, JournalTail
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: Status of a run or sweep that is running according to its journal, but has no driver.
INTERRUPTED = "interrupted"
#: Status of a run whose checkpoints were removed.
ARCHIVED = "archived"
_ENDED = ("finished", "failed", "stopped")
Config = TypeVar("Config")


class RunReader(Generic[Config]):
    """A run as far as its folder can be read. It is empty until :meth:`refresh`, which reads only what is new.

    A journal that was replaced, cut or removed is read again from the beginning. Memory: the newest 65,536 steps
    (8 MiB) and the folded attempts and milestones. One thread at a time uses it.

    Args:
        load: returns the run's configuration with its amendments (``conf.of_run``).
    """

    def __init__(self, run: RunPaths, load: Callable[[RunPaths], Config]) -> None:
        self.run, self._load = run, load
        self.state = RunState()
        self.config: Config | None = None
        """None if it can't be read; ``problem`` says why."""
        self.driver: lease.Holder | None = None
        """The process that drives the run; None if no process does."""
        self.version = 0
        """Grows whenever the journal has grown or was replaced."""
        self.course = 0
        """Grows whenever the journal was read again from the beginning."""
        self._tail: JournalTail | None = None
        self._unreadable = self._config_problem = ""
        self._inodes: dict[str, int] = {}
        self._config_stat: tuple[int, ...] = ()

    def refresh(self) -> Self:
        """Read what is new. A run that can't be read gets the status ``damaged``, and is tried again next time."""
        self.driver = lease.driver(self.run)  # first: a driver journals the run's end before it lets go
        try:
            if self._tail is None or self._is_replaced(self._tail):
                self._open()
            else:
                self._advance(self._tail)
            self._unreadable = ""
        except StorageError as error:
            self._tail, self._unreadable = None, error.message
        return self

    @property
    def problem(self) -> str:
        """Why the run is damaged; else empty."""
        return self._unreadable or self._config_problem

    @property
    def status(self) -> str:
        """As in ``RunState``, or ``interrupted`` (no process drives it), ``stopping``, ``archived``, ``damaged``."""
        return "damaged" if self.problem else status_of(self.state, is_driven=self.driver is not None)

    @property
    def driver_pid(self) -> int | None:
        """Id of the driver's process; 0 if it is unknown, None if there is none."""
        return self.driver.pid if self.driver else None

    @property
    def driver_elsewhere(self) -> str:
        """The driver's process and host if it is on another host; else empty."""
        return str(self.driver) if self.driver and self.driver.is_elsewhere else ""

    @property
    def ended(self) -> bool:
        """Whether no process drives the run."""
        return self.driver is None

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing to stop: no driver, and no job left by a dead driver."""
        attempt = self.state.attempt
        job_ended = attempt is None or attempt.ended_unix_s is not None
        return self.ended and (self.status == ARCHIVED or (job_ended and self.status in _ENDED))

    @property
    def can_resume(self) -> bool:
        """Whether `hlatctl resume` would continue the run."""
        return self.ended and self.status not in ("finished", ARCHIVED, "damaged")

    def _open(self) -> None:
        self._inodes = _inodes(self.run)
        self._read_config()
        self.state, self._tail = follow(self.run)
        self.version += 1
        self.course += 1

    def _advance(self, tail: JournalTail) -> None:
        read_bytes, is_amended = tail.bytes_read, False
        for event in tail.stream():
            is_amended |= event["kind"] == "config_amended"
            apply(self.state, event)
            self._saw(event)
        if is_amended or self._config_problem or _stat(self.run) != self._config_stat:
            self._read_config()
        self.version += tail.bytes_read != read_bytes

    def _saw(self, event: Event) -> None:
        """Called with each new event, but not with those that :meth:`_open` reads."""

    def _read_config(self) -> None:
        self._config_stat = _stat(self.run)
        try:
            self.config, self._config_problem = self._load(self.run), ""
        except HlatctlError as error:
            self.config, self._config_problem = None, error.message

    def _is_replaced(self, tail: JournalTail) -> bool:
        now, before = _inodes(self.run), self._inodes
        self._inodes = now
        if any(now.get(name) != inode for name, inode in before.items()):
            return True
        return any(_size(self.run, stem) < offset for stem, offset in tail.offsets.items() if offset)


def status_of(state: RunState, *, is_driven: bool) -> str:
    """Return a run's status, from its journal and whether a process drives it."""
    if state.archived and not is_driven:
        return ARCHIVED
    if state.status in _ENDED or (not is_driven and state.status != "running"):
        return state.status
    if is_driven:
        return "stopping" if state.stop_requested else "running"
    # A driver that stops on a full disk can't journal its end. Without an open attempt, nothing is running.
    attempt = state.attempt
    is_training = attempt is not None and attempt.ended_unix_s is None and not state.train_stopped
    return "stopped" if state.stop_requested and not is_training else INTERRUPTED


def _inodes(run: RunPaths) -> dict[str, int]:
    found = {}
    with suppress(OSError), os.scandir(run.journal) as entries:
        found = {entry.name: entry.inode() for entry in entries if entry.name.endswith(".jsonl")}
    return found


def _stat(run: RunPaths) -> tuple[int, ...]:
    with suppress(OSError):
        status = os.stat(run.config)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


def _size(run: RunPaths, stem: str) -> int:
    try:
        return os.stat(run.journal / f"{stem}.jsonl").st_size
    except OSError:
        return 0
