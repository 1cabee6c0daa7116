"""Index the Arrow files of all sources where they lie: several files a task, in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hlatctl.run.errors import DataError
from trainer.data.arrow_headers import fill_headers
from trainer.data.convert import Corrupt
from trainer.data.damage import fail
from trainer.data.index import Indexed, Rows, held_out_rows, index_file
from trainer.data.pieces import Piece
from trainer.data.stand_in import drop, remote_of
from trainer.data.table import TableWriter
from trainer.data.workers import Progress, count, spread

_FILES_PER_TASK = 64


@dataclass(frozen=True, kw_only=True)
class _Task:
    pieces: tuple[Piece, ...]
    fraction: float
    skip: bool


@dataclass(frozen=True, kw_only=True)
class _File:
    """An Arrow file; without an index, it must be converted."""

    piece: Piece
    indexed: Indexed | None
    held_out: Rows
    damage: list[str]


@dataclass(kw_only=True)
class InPlace:
    """The files of one source that are used where they lie.

    Args:
        table: for them, and for the prepared files that follow.
    """

    table: TableWriter
    rows: int = 0
    text_bytes: int = 0
    fingerprints: list[str] = field(default_factory=list)
    corrupt: Corrupt = field(default_factory=Corrupt)


def index_in_place(
    stack: ExitStack,
    pieces: Sequence[Sequence[Piece]],
    folder: Path,
    progress: Progress,
    *,
    fraction: float,
    skip: bool,
) -> tuple[list[InPlace], list[Piece]]:
    """Write the tables of all sources, with the Arrow files that can be used where they lie.

    Args:
        stack: closes the tables.
        pieces: the inputs of each source.
        folder: to write to.
        progress: is shown.
        fraction: of each file's rows to hold out; the first of a source is for training.
        skip: skip damage.

    Returns:
        For each source its files in place; and the inputs of all sources that must be converted, in order.

    Raises:
        DataError: a file lacks the column; or it is damaged, and damage is not skipped.
    """
    sources = [InPlace(table=TableWriter(folder, f"index-{source:02d}")) for source in range(len(pieces))]
    for source in sources:
        stack.callback(source.table.close)
    rest = [piece for own in pieces for piece in own if not piece.is_arrow]
    arrow = [piece for own in pieces for piece in own if piece.is_arrow]
    groups = [arrow[first : first + _FILES_PER_TASK] for first in range(0, len(arrow), _FILES_PER_TASK)]
    tasks = [_Task(pieces=tuple(group), fraction=fraction, skip=skip) for group in groups]
    for files in spread(_index, tasks, progress):
        for file in files:
            if file.indexed is None:
                rest.append(file.piece)
            else:
                _add(sources[file.piece.source], file.piece.number, file.indexed, file)
    return sources, sorted(rest, key=lambda piece: (piece.source, piece.number))


def _add(source: InPlace, number: int, indexed: Indexed, file: _File) -> None:
    held_out = file.held_out
    if not source.table.documents and held_out[:1].tolist() == [0]:
        held_out = held_out[1:]
    source.table.add(indexed, number, held_out, checked=True)
    source.rows += indexed.rows
    source.text_bytes += indexed.text_bytes
    source.fingerprints.append(indexed.fingerprint)
    for message in file.damage:
        source.corrupt.note(DataError(message))


def _index(task: _Task) -> list[_File]:
    return [_index_one(piece, task.fraction, skip=task.skip) for piece in task.pieces]


def _index_one(piece: Piece, fraction: float, *, skip: bool) -> _File:
    damage: list[str] = []
    report: Any = (lambda error: damage.append(error.message)) if skip else fail
    if remote := remote_of(piece.path):
        fill_headers(piece.path)
    indexed = index_file(piece.path, piece.column, report)
    if remote:
        drop(piece.path)
    if indexed is None:  # conversion reports the damage, and counts the file
        return _File(piece=piece, indexed=None, held_out=np.empty(0, dtype=np.int64), damage=[])
    count(documents=indexed.rows, input_bytes=piece.size)
    held_out = held_out_rows(indexed.fingerprint, indexed.rows, fraction)
    return _File(piece=piece, indexed=indexed, held_out=held_out, damage=damage)
