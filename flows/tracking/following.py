"""Follows a run's journal with a copy to a service that may be down."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.journal import MIRROR_WRITER, JournalTail, JournalWriter, no_steps
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths

_MAX_BACKOFF_POLLS = 8
_LOOK_S = 0.25


def follow(
    run: RunPaths, copy_new: Callable[[], int], say: Callable[[str], None], *, title: str, what: str, poll_s: float
) -> None:
    """Copy new entries until the run has finished, or until it has no driver and nothing is new.

    Args:
        run: the run; its flow journals ``head_started`` before it starts a follower.
        copy_new: copies new entries and returns their number. Raises StorageError if the service doesn't answer, and
            RunBusyError if another process is copying.
        say: called when the service stops answering, and when it answers again.
        title: display name of the service.
        what: name of the service in ``tracking_lost``.
        poll_s: seconds between two copies; longer after failures.

    Raises:
        StorageError, RunBusyError: the run has no driver, and it can't be copied now.
    """
    watch, failures, lost = _Watch(run), 0, False
    while True:
        # Checked before the copy, so that the copy includes everything written before the end.
        driven, ended = driver_pid(run) is not None, watch.ended()
        try:
            copied = copy_new()
        except (StorageError, RunBusyError) as error:
            if not driven:
                raise
            if failures == 0:
                say(str(error))
            if isinstance(error, StorageError) and not lost:
                lost = True
                _journal(run, "tracking_lost", what=what, message=f"{error.message}; the run continues")
            failures += 1
        else:
            if failures:
                say(f"{title} is up to date again")
            if lost:
                lost = False
                _journal(run, "tracking_back", what=what, events=copied)
            failures = 0
            if ended or (not driven and not copied):
                return
        polls = min(2**failures, _MAX_BACKOFF_POLLS)
        watch.wait(polls * poll_s, until_ended=not failures)


def _journal(run: RunPaths, kind: str, *, what: str, **fields: Any) -> None:
    """Append an event to the service's own file, unless the disk is full or another follower holds the file."""
    writer = MIRROR_WRITER if what == "mlflow" else f"{MIRROR_WRITER}-{what}"
    with suppress(RunBusyError, StorageError), JournalWriter(run, writer) as journal:
        journal.append(kind, what=what, **fields)


class _Watch:
    def __init__(self, run: RunPaths) -> None:
        self._tail = JournalTail(run, wanted=no_steps)
        self._ended = False

    def ended(self) -> bool:
        """Return whether the newest driver has written ``run_finished``."""
        for event in self._tail.stream():
            if event["kind"] in ("head_started", "run_finished"):
                self._ended = event["kind"] == "run_finished"
        return self._ended

    def wait(self, seconds: float, *, until_ended: bool) -> None:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0 and not (until_ended and self.ended()):
            time.sleep(min(left_s, _LOOK_S))
