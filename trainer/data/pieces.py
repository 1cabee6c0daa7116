"""What there is to prepare: the inputs of a source, and the units of work that convert them. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.fingerprint import digest
from trainer.data.corpus import Corpus
from trainer.data.formats import format_of

#: A unit of work has about this many bytes of input. The order of documents depends on it, and never on the machine.
UNIT_BYTES = 256 << 20
_SPLIT_AT_LINES = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """An input of a source: a file, or a range of a large one.

    Args:
        source: index of the source.
        number: position in the source's inputs.
        path: of the file.
        column: of the text.
        modules: it is a Python module.
        size: bytes to read.
        start: first byte of a range.
        is_range: the file is several inputs.
    """

    source: int
    number: int
    path: Path
    column: str
    modules: bool
    size: int
    start: int = 0
    is_range: bool = False

    @property
    def is_arrow(self) -> bool:
        """Whether it may be used where it lies."""
        return not self.modules and format_of(self.path) == "arrow"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Inputs that one process converts, in order.

    Args:
        number: of the unit, from 0.
        pieces: its inputs.
        fraction: of the documents to hold out.
        skip: skip damage.
    """

    number: int
    pieces: tuple[Piece, ...]
    fraction: float
    skip: bool

    @property
    def key(self) -> str:
        """A hash of all that the result depends on."""
        return digest([[self.number, self.fraction, self.skip], *map(_identity, self.pieces)])


def pieces_of(source: int, corpus: Corpus) -> list[Piece]:
    """Return the inputs of a source in order: each file, and large JSON Lines in ranges."""
    parts = [part for path in corpus.files for part in _ranges(path, modules=corpus.modules)]
    return [
        Piece(
            source=source,
            number=number,
            path=path,
            column=corpus.column,
            modules=corpus.modules,
            size=size,
            start=start,
            is_range=is_range,
        )
        for number, (path, start, size, is_range) in enumerate(parts)
    ]


def units_of(pieces: Iterable[Piece], *, fraction: float, skip: bool) -> list[Unit]:
    """Return units of about :data:`UNIT_BYTES` that contain all pieces in order."""
    groups: list[list[Piece]] = []
    size = UNIT_BYTES
    for piece in pieces:
        if size >= UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.size
    return [Unit(number=i, pieces=tuple(group), fraction=fraction, skip=skip) for i, group in enumerate(groups)]


def _ranges(path: Path, *, modules: bool) -> Iterator[tuple[Path, int, int, bool]]:
    size = path.stat().st_size
    if modules or not path.name.lower().endswith(_SPLIT_AT_LINES) or size < 2 * UNIT_BYTES:
        yield path, 0, size, False
        return
    for start in range(0, size, UNIT_BYTES):
        yield path, start, min(UNIT_BYTES, size - start), True


def _identity(piece: Piece) -> list[Any]:
    status = piece.path.stat()
    file = [os.fspath(piece.path), status.st_size, status.st_mtime_ns]
    return [*file, piece.source, piece.number, piece.column, piece.modules, piece.start, piece.size]
