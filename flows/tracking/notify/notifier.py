"""Reads a run's journal and sends its messages: each one once, at most 20 an hour to a service, then a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from conf.schema import Config
from flows.tracking.notify import book as books
from flows.tracking.notify import numbers, services
from flows.tracking.notify.book import Book, Queue
from flows.tracking.notify.notes import URGENT, Message, Note, note_of, shown, summary
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import NOTIFY_WRITER, Event, JournalTail, JournalWriter, no_steps
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: Most messages to one service in an hour.
PER_HOUR = 20
_HOUR_S, _DAY_S = 3600.0, 86_400.0
#: Between two looks at the forecast.
_FORECAST_S = 600.0
#: Wait after the first failure of a service, which doubles with each further one, and the longest one.
_RETRY_S, _MAX_RETRY_S = 5.0, 600.0

Send = Callable[[str, Message], str]


@contextmanager
def only_notifier(run: RunPaths) -> Iterator[None]:
    """Hold the lock of the process that sends a run's messages.

    Raises:
        RunBusyError: another process holds it.
    """

    def refuse(holder: Holder) -> None:
        raise RunBusyError(
            f"run {run.run_id}: {holder} is sending its messages", hint="it sends all of them; nothing to do"
        )

    with hold(run.notify.with_suffix(".lock"), refuse):
        yield


class Notifier:
    """Sends a run's messages. Hold :func:`only_notifier`.

    Args:
        run: the run directory.
        config: the run's configuration.
        send: sends a message to an entry of ``notify.urls``; returns why it failed, or nothing.
        now_unix_s: the clock.
    """

    def __init__(
        self, run: RunPaths, config: Config, *, send: Send = services.send, now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._run, self._config, self._send, self._now_unix_s = run, config, send, now_unix_s
        kept = books.read(run)
        self._book = kept or Book()
        self._is_new = kept is None
        self._tail = self._journal_tail()
        urls = config.notify.urls
        self._book.queues = {entry: self._book.queues.get(entry) or Queue() for entry in urls}
        self._failures = dict.fromkeys(urls, 0)
        self._next_try_unix_s = dict.fromkeys(urls, 0.0)
        self._next_forecast_unix_s = 0.0
        #: Messages that this object has sent.
        self.sent = 0
        #: The newest driver has written the run's end.
        self.ended = False
        #: Why each entry that fails now does.
        self.problems: dict[str, str] = {}

    @property
    def waiting(self) -> int:
        """Number of unsent messages."""
        return sum(len(queue.waiting) for queue in self._book.queues.values())

    def poll(self) -> None:
        """Read new events, and send what is unsent.

        Raises:
            StorageError: the journal can't be read.
        """
        try:
            changed = self._read() | self._look()
        except StorageError:
            self._tail = self._journal_tail()  # it may have read a part of the new events
            raise
        if changed or self._is_new:
            self._is_new = False
            books.write(self._run, self._book)
        for entry, queue in self._book.queues.items():
            self._deliver(entry, queue)

    def add(self, note: Note, time_unix_s: float, lines: tuple[str, ...] = ()) -> None:
        """Queue a message, unless the same was said within a day or ``notify.on`` lacks its kind."""
        now_unix_s, key = self._now_unix_s(), shown(note.key)
        said = {old: at for old, at in self._book.said_unix_s.items() if now_unix_s - at < _DAY_S}
        if key in said or (note.kind != "digest" and note.kind not in self._config.notify.on):
            return
        self._book.said_unix_s = {**said, key: now_unix_s}
        for queue in self._book.queues.values():
            queue.waiting.append(note.message(self._run, time_unix_s, lines))

    def _journal_tail(self) -> JournalTail:
        return JournalTail(self._run, self._book.offsets, wanted=no_steps)

    def _read(self) -> bool:
        events = self._tail.read_new()
        if self._is_new:
            events = _since_the_newest_driver(events)
        notes = [(note, event["time_unix_s"]) for event in events if (note := note_of(event, self._run))]
        for event in events:
            if event["kind"] in ("head_started", "run_finished"):
                self.ended = event["kind"] == "run_finished"
        if notes:
            lines = tuple(numbers.position(self._state(), self._config, self._now_unix_s()))
            for note, time_unix_s in notes:
                self.add(note, time_unix_s, lines)
        self._book.offsets = self._tail.offsets
        return bool(events)

    def _look(self) -> bool:
        """Look at the forecast and the time of day; return whether the book has changed."""
        now_unix_s, book, notify = self._now_unix_s(), self._book, self._config.notify
        if now_unix_s < self._next_forecast_unix_s or not (
            "forecast_slip" in notify.on or notify.digest_hour is not None
        ):
            return False
        self._next_forecast_unix_s = now_unix_s + _FORECAST_S
        state = self._state()
        lines = tuple(numbers.position(state, self._config, now_unix_s))
        book.forecast, happened = numbers.slip(book.forecast, state, self._config, now_unix_s)
        if happened:
            self.add(numbers.slip_note(self._run, happened), now_unix_s, lines)
        book.digest = book.digest or numbers.snapshot(state, now_unix_s)
        if notify.digest_hour is not None and numbers.is_due(book.digest, notify.digest_hour, now_unix_s):
            self.add(numbers.digest_note(self._run, state, self._config, book.digest, now_unix_s), now_unix_s, lines)
            book.digest = numbers.snapshot(state, now_unix_s)
        return True

    def _state(self) -> RunState:
        return read_state(self._run)

    def _deliver(self, entry: str, queue: Queue) -> None:
        now_unix_s = self._now_unix_s()
        queue.sent_unix_s = [at for at in queue.sent_unix_s if now_unix_s - at < _HOUR_S]
        room = PER_HOUR - len(queue.sent_unix_s)
        if len(queue.waiting) > max(room, 1):
            queue.waiting = [summary(self._run.run_id, queue.waiting)]
        while queue.waiting and self._next_try_unix_s[entry] <= self._now_unix_s():
            if len(queue.sent_unix_s) >= PER_HOUR and queue.waiting[0].kind not in URGENT:
                return
            if problem := self._send(entry, queue.waiting[0]):
                self._failed(entry, problem)
                return
            del queue.waiting[0]
            self.sent += 1
            queue.sent_unix_s.append(self._now_unix_s())
            books.write(self._run, self._book)
            self._worked(entry)

    def _failed(self, entry: str, problem: str) -> None:
        wait_s = min(_RETRY_S * 2 ** self._failures[entry], _MAX_RETRY_S)
        self._next_try_unix_s[entry] = self._now_unix_s() + wait_s
        self._failures[entry] = min(self._failures[entry] + 1, 30)
        if entry not in self.problems:
            self._journal("tracking_lost", message=f"{problem}; the run continues")
        self.problems[entry] = problem

    def _worked(self, entry: str) -> None:
        self._failures[entry] = 0
        if self.problems.pop(entry, None):
            self._journal("tracking_back", events=1)

    def _journal(self, kind: str, **fields: Any) -> None:
        """Append an event, unless the disk is full."""
        with suppress(RunBusyError, StorageError), JournalWriter(self._run, NOTIFY_WRITER) as journal:
            journal.append(kind, what="notify", **fields)


def _since_the_newest_driver(events: list[Event]) -> list[Event]:
    """Return the events that a book that begins anew tells: not those of an old run's life without messages."""
    starts = [index for index, event in enumerate(events) if event["kind"] == "head_started"]
    return events[starts[-1] :] if starts else events
