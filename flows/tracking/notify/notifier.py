"""Sends the messages about a run's journal: each one once, at most 20 an hour to a service, then a summary.

``notify.json``, the book, records how far the journal was read, what was sent, and the messages that each service still
gets. It is written after a message was sent. A process that is killed in between sends that one message again: a
repeated message is better than a missing one. A missing or damaged file is replaced by one that begins at the newest
driver's start.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from conf.of_run import CONFIG_AMENDED, of_run
from conf.schema import Config
from flows.tracking.notify import services
from flows.tracking.notify.notes import URGENT, Message, Note, note_of, shown, summary
from hlatctl.plan.pace import training_left_s
from hlatctl.report.goodput import measure_goodput
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError, RunBusyError, StorageError
from hlatctl.run.evaluations import in_words
from hlatctl.run.files import DAMAGED, from_plain
from hlatctl.run.fold import read_state
from hlatctl.run.journal import NOTIFY_WRITER, Event, JournalTail, JournalWriter, no_steps
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from hlatctl.units import count, counted, duration, number, utc


@dataclass
class Queue:
    """The messages for one entry of ``notify.urls``.

    Args:
        waiting: unsent messages, oldest first.
        sent_unix_s: times of the messages sent in the last hour.
    """

    waiting: list[Message] = field(default_factory=list)
    sent_unix_s: list[float] = field(default_factory=list)


@dataclass
class Digest:
    """The run at the time of the newest digest."""

    time_unix_s: float
    tokens: int = 0
    loss: float | None = None


@dataclass
class Forecast:
    """The end of training that was last announced, and since when the prediction is a day later."""

    end_unix_s: float
    late_since_unix_s: float | None = None


@dataclass
class Book:
    """The content of ``notify.json``.

    Args:
        offsets: bytes of the journal that were read, by file stem.
        said_unix_s: when each key of a note was last sent, kept for a day.
        queues: queues by entry of ``notify.urls``.
    """

    offsets: dict[str, int] = field(default_factory=dict)
    said_unix_s: dict[str, float] = field(default_factory=dict)
    queues: dict[str, Queue] = field(default_factory=dict)
    digest: Digest | None = None
    forecast: Forecast | None = None


def read_book(run: RunPaths) -> Book | None:
    """Return a run's book; None if it is missing or damaged."""
    try:
        return from_plain(Book, files.read_sealed_json(run.notify))
    except (OSError, *DAMAGED):
        return None


def write_book(run: RunPaths, book: Book) -> None:
    """Write a run's book durably. A full disk is no error, because it is a reason to send a message."""
    with suppress(OSError, HlatctlError):
        files.write_sealed_json(run.notify, dataclasses.asdict(book))


_NUMBERS_DAY_S = 86_400.0
#: Seconds that a prediction must be late before it is announced: a slow hour doesn't move the end.
_STAYS_LATE_S = 3600.0


def position(state: RunState, config: Config, now_unix_s: float) -> Iterator[str]:
    """Yield the lines about a run's position and the predicted end of training."""
    last = state.last_step
    if last is None:
        return
    yield (
        f"Now: step {state.step:,} of {config.total_steps:,}, {count(state.tokens)} tokens, "
        f"loss {number(last, 'loss'):.4f}"
    )
    if state.status == "running" and (left_s := training_left_s(state, config)):
        yield f"Forecast: training ends at {utc(now_unix_s + left_s)}, in {duration(left_s)}"


def slip(forecast: Forecast | None, state: RunState, config: Config, now_unix_s: float) -> tuple[Forecast | None, str]:
    """Compare the predicted end of training with the announced one.

    Returns:
        The forecast to keep, and what happened; empty unless the end has been a day later for an hour. The new end then
        counts as announced, so that the same delay is not announced twice.
    """
    left_s = training_left_s(state, config) if state.status == "running" else None
    if left_s is None:
        return forecast, ""
    end_unix_s = now_unix_s + left_s
    if forecast is None:
        return Forecast(end_unix_s), ""
    if end_unix_s - forecast.end_unix_s <= _NUMBERS_DAY_S:
        return Forecast(forecast.end_unix_s), ""
    since_unix_s = forecast.late_since_unix_s or now_unix_s
    if now_unix_s - since_unix_s < _STAYS_LATE_S:
        return Forecast(forecast.end_unix_s, since_unix_s), ""
    late = duration(end_unix_s - forecast.end_unix_s)
    return Forecast(end_unix_s), f"training is predicted to end at {utc(end_unix_s)}, {late} later than before"


def slip_note(run: RunPaths, happened: str) -> Note:
    """Return the note about a predicted end that is a day later."""
    command = f"hlatctl goodput {run.run_id}"
    return Note(kind="forecast_slip", title="the predicted end slips", key=happened, happened=happened, command=command)


def is_due(digest: Digest, hour: int, now_unix_s: float) -> bool:
    """Return whether the hour (UTC) of a digest has passed since the last one."""
    return digest.time_unix_s < math.floor((now_unix_s - 3600 * hour) / _NUMBERS_DAY_S) * _NUMBERS_DAY_S + 3600 * hour


def snapshot(state: RunState, now_unix_s: float) -> Digest:
    """Return the values with which the next digest compares."""
    loss = number(state.last_step, "loss") if state.last_step else math.nan
    return Digest(now_unix_s, state.tokens, loss if math.isfinite(loss) else None)


def digest_note(run: RunPaths, state: RunState, config: Config, before: Digest, now_unix_s: float) -> Note:
    """Return the daily note about a run."""
    now = snapshot(state, now_unix_s)
    parts = [f"{count(now.tokens)} of {count(config.total_tokens)} tokens ({_signed(now.tokens - before.tokens)})"]
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}" + (f" (before: {before.loss:.4f})" if before.loss is not None else ""))
    evaluated = [state.milestones[tokens] for tokens in sorted(state.milestones) if state.milestones[tokens].scores]
    if evaluated:
        parts.append(f"scores at {count(evaluated[-1].milestone_tokens)}: {in_words(evaluated[-1].scores)}")
    ended = [a for a in state.attempts if a.ended_unix_s is not None and a.ended_unix_s > before.time_unix_s]
    failed = [attempt.cause for attempt in ended if attempt.has_failed]
    parts.append(counted(len(failed), "failure") + (f" ({', '.join(sorted(set(failed)))})" if failed else ""))
    parts += _goodput(run, state, config)
    title = f"digest of {utc(now_unix_s)[:10]}"
    return Note(
        kind="digest", title=title, key=title, happened="; ".join(parts), command=f"hlatctl status {run.run_id}"
    )


def _signed(tokens: int) -> str:
    return f"{'+' if tokens >= 0 else '-'}{count(abs(tokens))} since the last digest"


def _goodput(run: RunPaths, state: RunState, config: Config) -> list[str]:
    """Return the goodput; reads the whole journal except steps, once a day."""
    try:
        share = measure_goodput(JournalTail(run, wanted=no_steps).stream(), config, state).ettr_fraction
    except HlatctlError:
        return []
    return [] if share is None else [f"goodput {100 * share:.1f} %"]


#: Maximum number of messages to one service per hour.
PER_HOUR = 20
_HOUR_S, _DAY_S = 3600.0, 86_400.0
#: Seconds between two checks of the forecast.
_FORECAST_S = 600.0
#: Seconds to wait after the first failure of a service, doubled with each further one, and the longest wait.
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
    """Sends a run's messages. The caller must hold :func:`only_notifier`.

    Args:
        send: sends a message to an entry of ``notify.urls``; returns why it failed, or nothing.
        now_unix_s: the clock.
    """

    def __init__(
        self, run: RunPaths, config: Config, *, send: Send = services.send, now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._run, self._config, self._send, self._now_unix_s = run, config, send, now_unix_s
        kept = read_book(run)
        self._book = kept or Book()
        self._is_new = kept is None
        self._tail = self._journal_tail()
        urls = config.notify.urls
        self._book.queues = {entry: self._book.queues.get(entry) or Queue() for entry in urls}
        self._failures = dict.fromkeys(urls, 0)
        self._next_try_unix_s = dict.fromkeys(urls, 0.0)
        self._next_forecast_unix_s = 0.0
        #: Number of messages that this object has sent.
        self.sent = 0
        #: The newest driver has journalled the run's end.
        self.ended = False
        #: Reason of each entry that currently fails.
        self.problems: dict[str, str] = {}

    @property
    def waiting(self) -> int:
        """The number of unsent messages."""
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
            write_book(self._run, self._book)
        for entry, queue in self._book.queues.items():
            self._deliver(entry, queue)

    def add(self, note: Note, time_unix_s: float, lines: tuple[str, ...] = ()) -> None:
        """Queue a message, unless the same was sent within a day or ``notify.on`` lacks its kind."""
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
        if any(event["kind"] == CONFIG_AMENDED for event in events):
            with suppress(HlatctlError):  # a configuration that can't be read leaves the former choice
                self._config = of_run(self._run)  # notify.on and notify.digest_hour change at once
        if notes:
            lines = tuple(position(self._state(), self._config, self._now_unix_s()))
            for note, time_unix_s in notes:
                self.add(note, time_unix_s, lines)
        self._book.offsets = self._tail.offsets
        return bool(events)

    def _look(self) -> bool:
        """Check the forecast and the time of day; return whether the book has changed."""
        now_unix_s, book, notify = self._now_unix_s(), self._book, self._config.notify
        if now_unix_s < self._next_forecast_unix_s or not (
            "forecast_slip" in notify.on or notify.digest_hour is not None
        ):
            return False
        self._next_forecast_unix_s = now_unix_s + _FORECAST_S
        state = self._state()
        lines = tuple(position(state, self._config, now_unix_s))
        book.forecast, happened = slip(book.forecast, state, self._config, now_unix_s)
        if happened:
            self.add(slip_note(self._run, happened), now_unix_s, lines)
        book.digest = book.digest or snapshot(state, now_unix_s)
        if notify.digest_hour is not None and is_due(book.digest, notify.digest_hour, now_unix_s):
            self.add(digest_note(self._run, state, self._config, book.digest, now_unix_s), now_unix_s, lines)
            book.digest = snapshot(state, now_unix_s)
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
            write_book(self._run, self._book)
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
        with suppress(RunBusyError, StorageError), JournalWriter(self._run, NOTIFY_WRITER) as journal:
            journal.append(kind, what="notify", **fields)


def _since_the_newest_driver(events: list[Event]) -> list[Event]:
    """Return the events that a new book reports: none from an old run's time without messages."""
    starts = [index for index, event in enumerate(events) if event["kind"] == "head_started"]
    return events[starts[-1] :] if starts else events
