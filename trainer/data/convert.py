"""Convert one unit of inputs to Arrow files: the work of one process. A finished unit is kept after a kill."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.units import one_line
from trainer.data import formats
from trainer.data.corpus import read_module
from trainer.data.damage import Report, Row, fail
from trainer.data.json_lines import LineRange, read_lines
from trainer.data.pieces import Piece, Unit
from trainer.data.split import Document, Split
from trainer.data.stand_in import drop, fetch, in_words, remote_of
from trainer.data.workers import count

#: ``dataset.json`` keeps this many messages about skipped damage, and counts all of it.
CORRUPT_KEPT = 20
_COUNT_EVERY = 1000


class Corrupt:
    """Counts damage that is skipped, and keeps the first messages."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def note(self, error: DataError) -> None:
        """Count one damaged row or part of a file."""
        self.count += 1
        if len(self.messages) < CORRUPT_KEPT:
            message = in_words(error.message)
            self.messages.append(message)
            print(f"skipped: {one_line(message)}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A unit, and the folder to write to."""

    unit: Unit
    folder: Path


def convert(task: Task) -> dict[str, Any]:
    """Convert a unit, unless it is converted already.

    Returns:
        ``files`` and ``validation`` as in ``dataset.json``; ``pieces``: for each, ``source``, ``number``, ``lines``,
        ``rows``, ``skipped_rows``, ``documents``, ``corrupt``, ``corrupt_count``.

    Raises:
        DataError: an input is damaged, and damage is not skipped.
    """
    unit, record = task.unit, task.folder / f"unit-{task.unit.number:05d}.json"
    done = _done(record, unit)
    if done is None:
        with closing(Split(task.folder, unit.fraction, unit.number)) as split:
            pieces = [_convert_fetched(split, piece, skip=unit.skip) for piece in unit.pieces]
            done = {"key": unit.key, "pieces": pieces, **split.finish()}
        files.write_sealed_json(record, done)
    else:
        documents = sum(piece["documents"] for piece in done["pieces"])
        count(documents=documents, input_bytes=sum(piece.size for piece in unit.pieces))
    return done


def _done(record: Path, unit: Unit) -> dict[str, Any] | None:
    try:
        done = files.read_sealed_json(record)
    except (OSError, ValueError):
        return None
    return done if done.get("key") == unit.key else None


def _convert_fetched(split: Split, piece: Piece, *, skip: bool) -> dict[str, Any]:
    """Convert an input. One in object storage is on the disk only meanwhile."""
    if remote_of(piece.path) is None:
        return _convert_piece(split, piece, skip=skip)
    fetch(piece.path, piece.start, piece.size, whole_lines=piece.is_range)
    try:
        return _convert_piece(split, piece, skip=skip)
    finally:
        drop(piece.path)


def _convert_piece(split: Split, piece: Piece, *, skip: bool) -> dict[str, Any]:
    rows, skipped, counted, corrupt = 0, 0, 0, Corrupt()
    report = corrupt.note if skip else fail
    lines = LineRange(piece.path, piece.start, piece.start + piece.size) if piece.is_range else None
    for row, text in _read(piece, lines, report):
        rows += 1
        if text is None or not text.strip() or not _is_unicode(text):
            skipped += 1
        else:
            split.add(Document(text=text, source=piece.source, file=piece.number, row=row))
        if rows % _COUNT_EVERY == 0:
            done = lines.read_bytes if lines else 0
            count(documents=_COUNT_EVERY, input_bytes=done - counted)
            counted = done
    count(documents=rows % _COUNT_EVERY, input_bytes=piece.size - counted)
    return {
        "source": piece.source,
        "number": piece.number,
        "lines": lines.count if lines else 0,
        "rows": rows,
        "skipped_rows": skipped,
        "documents": rows - skipped,
        "corrupt": corrupt.messages,
        "corrupt_count": corrupt.count,
    }


def _read(piece: Piece, lines: LineRange | None, report: Report) -> Iterator[Row]:
    """Yield the rows of an input; the text of a row is None or blank if there is none."""
    if piece.modules:
        return read_module(piece.path)
    if lines is not None:
        return read_lines(lines, piece.column, report)
    return formats.read_documents(piece.path, piece.column, report)


def _is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogate: JSON can encode one, but UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
