"""``notify.json``: how far the journal was read, what was said, and the messages that each service still gets.

It is written after a message was sent. A process that is killed in between sends that one message again: a repeated
message is better than a missing one. A missing or damaged file begins anew at the newest driver's start.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field

from flows.tracking.notify.notes import Message
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError
from hlatctl.run.paths import RunPaths
from hlatctl.run.plain import from_plain
from hlatctl.run.reading import DAMAGED


@dataclass
class Queue:
    """The messages for one entry of ``notify.urls``.

    Args:
        waiting: unsent messages, oldest first.
        sent_unix_s: when messages were sent, for an hour.
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
    """The end of training that people know, and since when the prediction is a day later."""

    end_unix_s: float
    late_since_unix_s: float | None = None


@dataclass
class Book:
    """What ``notify.json`` holds.

    Args:
        offsets: bytes of the journal that were read, by file stem.
        said_unix_s: when each key of a note was said, for a day.
        queues: by entry of ``notify.urls``.
    """

    offsets: dict[str, int] = field(default_factory=dict)
    said_unix_s: dict[str, float] = field(default_factory=dict)
    queues: dict[str, Queue] = field(default_factory=dict)
    digest: Digest | None = None
    forecast: Forecast | None = None


def read(run: RunPaths) -> Book | None:
    """Return a run's book; None if there is none, or it is damaged."""
    try:
        return from_plain(Book, files.read_sealed_json(run.notify))
    except (OSError, *DAMAGED):
        return None


def write(run: RunPaths, book: Book) -> None:
    """Write it durably. A full disk is no error: it is a reason to send a message."""
    with suppress(OSError, HlatctlError):
        files.write_sealed_json(run.notify, dataclasses.asdict(book))
