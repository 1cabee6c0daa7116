"""A run's or sweep's name, tags and notes, and the words that mark simulations. Each change is an event."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.journal import OPERATOR_WRITER, Event, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide

LABELLED = "labelled"
_TAG_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
#: Prefixes of tags with a meaning in MLflow or hlatctl.
_RESERVED = ("mlflow.", "hlatctl.")
_MAX_NAME, _MAX_VALUE, _MAX_NOTE = 100, 250, 5000


@dataclass
class NoteState:
    """A note: its text, who wrote it, and when."""

    text: str
    by: str
    time_unix_s: float


@dataclass
class LabelState:
    """Name (may be empty), tags and notes, the oldest note first."""

    name: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    notes: list[NoteState] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of labels, checked.

    Args:
        name: new name; empty: remove it; None: leave it.
        tags: tags to set.
        untag: keys of tags to remove.
        note: note to add; empty: none.
    """

    name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    untag: tuple[str, ...] = ()
    note: str = ""

    def __bool__(self) -> bool:
        return self.name is not None or bool(self.tags or self.untag or self.note)


def change(*, name: str | None = None, tags: Iterable[str] = (), untag: Iterable[str] = (), note: str = "") -> Change:
    """Return checked labels as they were typed, with secrets masked.

    Args:
        tags: tags as typed, such as ``model=small``.

    Raises:
        ConfigError: a label breaks a rule; names both.
    """
    _check_text("name", name or "", _MAX_NAME)
    _check_text("note", note, _MAX_NOTE, lines=True)
    return Change(
        name=None if name is None else hide(name.strip()),
        tags=dict(map(_tag, tags)),
        untag=tuple(untag),
        note=hide(note.strip()),
    )


def write_label(run: RunPaths, change: Change, *, by: str) -> None:
    """Journal a change of labels; an empty one writes nothing.

    Raises:
        RunBusyError: another process is writing labels.
        StorageError: the journal can't be written.
    """
    if not change:
        return
    fields: dict[str, Any] = {"tags": dict(change.tags), "untag": list(change.untag), "note": change.note}
    if change.name is not None:
        fields["name"] = change.name
    with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER) as journal:
        journal.append(LABELLED, durable=True, by=by, **fields)


def apply(labels: LabelState, event: Event) -> None:
    """Apply a ``labelled`` event."""
    labels.name = str(event.get("name", labels.name))
    for key in event.get("untag", []):
        labels.tags.pop(str(key), None)
    labels.tags |= {str(key): str(value) for key, value in event.get("tags", {}).items()}
    if event.get("note"):
        labels.notes.append(NoteState(str(event["note"]), str(event.get("by", "")), event["time_unix_s"]))


def _tag(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not _TAG_KEY.fullmatch(key):
        raise ConfigError(
            f"tag = {text!a:.80}: its key must be 1 to 63 letters, digits, '_', '.' or '-'",
            hint="a tag such as model=small",
        )
    if key.startswith(_RESERVED):
        raise ConfigError(
            f"tag = {text:.80}: keys that begin with {' or '.join(_RESERVED)} are reserved",
            hint="a tag such as model=small",
        )
    _check_text(f"tag {key}", value, _MAX_VALUE)
    return key, hide(value)


def _check_text(label: str, text: str, most: int, *, lines: bool = False) -> None:
    if len(text) > most:
        raise ConfigError(f"{label}: has {len(text)} characters, at most {most} are allowed")
    if not all(char.isprintable() or (lines and char in "\n\t") for char in text):
        raise ConfigError(f"{label} = {text!a:.80}: must not contain control characters")


#: Mark in names, progress lines and lists.
MARK = "SIMULATED"
#: Note after the name of an existing run.
NOTE = f"{MARK}: nothing was trained"
#: First line of commands that simulate.
WARNING = f"{MARK}: nothing is trained, and every number is made up"
#: Notice above a report.
REPORT = "nothing was trained; every number below is made up."


def noted(name: str, *, simulated: bool) -> str:
    """Return the name of a run or a sweep, with a note if it is simulated."""
    return f"{name}  {NOTE}" if simulated else name


def marked(name: str, *, simulated: bool) -> str:
    """Return the name of a run or a sweep, with a mark if it is simulated, for lists."""
    return f"{name} ({MARK})" if simulated else name


def leading(text: str, *, simulated: bool) -> str:
    """Return a line of progress, with a mark before it if the run is simulated."""
    return f"{MARK} · {text}" if simulated else text
