"""Find and check the files of each corpus, index the Arrow files where they lie, and convert the others to Arrow.

Inputs that must be converted are divided into units of work, each for one process. A finished unit survives a kill.
While converting, each document goes to the training files or to a held-out file. Arrow files of all sources are indexed
in place by several processes, several files per task. ``trainer.data.prepare`` runs all of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from conf.fingerprint import digest
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.units import one_line
from trainer.data import formats, tokenizer
from trainer.data.arrow_index import Indexed, Rows, TableWriter, fill_headers, held_out_rows, index_file
from trainer.data.documents import SCHEMA
from trainer.data.formats import LineRange, Report, TextRow, fail, format_of, read_lines
from trainer.data.remote import drop, fetch, fetch_ends, in_words, remote_of, shown
from trainer.data.workers import Progress, count, spread

#: Modules are cut into documents of about this size. Otherwise one of the largest (a table of 100,000 tokens) would
#: fill one row of the batch for a third of the quickstart.
_MODULE_DOCUMENT_BYTES = 8 * 1024
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One corpus of the configuration's mixture.

    Args:
        name: its path in the configuration.
        column: the text column.
        unread: number of unread files in the folder, by suffix.
        modules: the files are Python modules of the standard library.
    """

    name: str
    files: list[Path]
    column: str
    unread: dict[str, int] = field(default_factory=dict)
    modules: bool = False


def check(config: Config) -> list[Corpus]:
    """Check everything that needs no full read; return the configuration's corpora in order.

    Raises:
        DataError: a path, file, column or tokenizer can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
    """
    if config.tokenizer.path is not None:
        check_vocabulary(config, tokenizer.look(Path(config.tokenizer.path))["vocab_size"])
    if not config.data.inputs:
        return [_standard_library()]
    corpora = [_corpus(Path(source.path), source.text_column or "") for source in config.data.inputs]
    for corpus in corpora:
        _check_files(corpus, skip=config.data.on_corrupt == "skip")
    return corpora


def check_vocabulary(config: Config, vocab_size: int) -> None:
    """Raise a ConfigError if a tokenizer is larger than the model's embedding (``model.vocab_size``)."""
    if vocab_size > config.model.vocab_size:
        divisor = config.parallel.tensor_parallel_size
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: below the {vocab_size} tokens of the tokenizer "
            f"(tokenizer.path={config.tokenizer.path})",
            hint=f"set model.vocab_size={-(-vocab_size // divisor) * divisor} or more",
        )


def _check_files(corpus: Corpus, *, skip: bool) -> None:
    """Check every file; if damage is skipped, at least one must be readable.

    In object storage, only the column is checked, by reading the ends of one file of each format.
    """
    if remote_of(corpus.files[0]) is not None:
        for path in {formats.format_of(path): path for path in reversed(corpus.files)}.values():
            fetch_ends(path)
            formats.check_file(path, corpus.column, lambda _: None)
            drop(path)
        return
    damage: list[DataError] = []
    report = damage.append if skip else fail
    whole = [formats.check_file(path, corpus.column, report) for path in corpus.files]
    if damage and not any(whole):
        raise damage[0]


def read_module(path: Path) -> Iterator[TextRow]:
    """Yield the pieces of a Python module as rows; the text is None if it is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        yield 1, None  # the standard library contains such files, to test its own decoder
    except OSError as error:
        raise DataError(f"{path}: not readable ({error.strerror})") from None
    else:
        yield from enumerate(formats.cut(text.splitlines(keepends=True), _MODULE_DOCUMENT_BYTES), start=1)


def _corpus(path: Path, column: str) -> Corpus:
    files = formats.find_files(path)
    unread = formats.unread_files(path, set(files)) if path.is_dir() else {}
    return Corpus(name=shown(path), files=files, column=column, unread=unread)


def _standard_library() -> Corpus:
    """Return the interpreter's standard library without its tests, which not every system installs."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(p for p in root.rglob("*.py") if not _NOT_THE_LIBRARY & set(p.relative_to(root).parts))
    if not modules:
        raise DataError(
            f"data.source=python_stdlib: {root} contains no .py files",
            hint="use an interpreter that comes with its sources, or set data.path",
        )
    return Corpus(name=str(root), files=modules, column="", modules=True)


#: Input bytes per unit of work, about. The order of documents depends on it, and never on the machine.
UNIT_BYTES = 256 << 20
_SPLIT_AT_LINES = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """An input of a source: a file, or a range of a large one.

    Args:
        source: index of the source.
        number: position in the source's inputs.
        column: the text column.
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
        return not self.modules and bool((kind := format_of(self.path)) and kind.is_arrow)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Inputs that one process converts, in order; the units are numbered from 0."""

    number: int
    pieces: tuple[Piece, ...]
    fraction: float
    skip: bool

    @property
    def key(self) -> str:
        """Return a hash of everything that the result depends on."""
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


COLUMN = SCHEMA.names[0]
_BATCH_BYTES = 4 << 20
_FILE_BYTES = 1 << 30


def held_out_name(unit: int) -> str:
    """Return the name of the file of a unit's held-out documents."""
    return f"held-out-{unit:05d}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and its origin: the source, the input's position in the source's inputs, and the 1-based row there."""

    text: str
    source: int
    file: int
    row: int


class Split:
    """Sends each document of a unit to the training files or to the held-out file, and counts.

    A hash of (unit, position in the unit) decides. In unit 0, the first document is for training, and the last one is
    held out if no other is, so neither side of a corpus is empty.
    """

    def __init__(self, folder: Path, validation_fraction: float, unit: int) -> None:
        self._folder, self._fraction, self._unit = folder, validation_fraction, unit
        self._held_out = (folder / held_out_name(unit)).open("w", encoding="utf-8")
        self._writer: _ArrowWriter | None = None
        self._files: list[dict[str, Any]] = []
        self._validation = {"documents": 0, "text_bytes": 0}
        self._waiting: Document | None = None
        self.documents_of: Counter[int] = Counter()
        """Number of documents added, by source."""

    def add(self, document: Document) -> None:
        """Add a document."""
        if self._waiting is not None:
            self._place(self._waiting, self.documents_of.total() - 1)
        self.documents_of[document.source] += 1
        self._waiting = document

    def close(self) -> None:
        """Close the files."""
        self._close_file()
        self._held_out.close()

    def finish(self) -> dict[str, Any]:
        """Place the last document and finish the files; return ``files`` and ``validation`` of ``dataset.json``."""
        total = self.documents_of.total()
        if self._waiting is not None:
            if total > 1 and self._unit == 0 and not self._validation["documents"]:
                self._hold_out(self._waiting.text)
            else:
                self._place(self._waiting, total - 1)
        self._held_out.flush()
        os.fsync(self._held_out.fileno())
        self.close()
        return {"files": self._files, "validation": self._validation}

    def _place(self, document: Document, position: int) -> None:
        key = f"{self._unit}:{position}" if self._unit else str(position)
        share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
        if (position or self._unit) and share < self._fraction:
            self._hold_out(document.text)
            return
        if self._writer is not None and self._writer.source != document.source:
            self._close_file()
        if self._writer is None:
            self._writer = _ArrowWriter(
                self._folder / f"part-{self._unit:05d}-{len(self._files):03d}.arrow", document.source
            )
        self._writer.add(document)
        if self._writer.bytes >= _FILE_BYTES:
            self._close_file()

    def _hold_out(self, text: str) -> None:
        self._held_out.write(json.dumps({COLUMN: text}) + "\n")
        self._validation["documents"] += 1
        self._validation["text_bytes"] += len(text.encode())

    def _close_file(self) -> None:
        if self._writer:
            self._files.append(self._writer.close())
            self._writer = None


class _ArrowWriter:
    """One uncompressed Arrow IPC file of one source, written in batches."""

    def __init__(self, path: Path, source: int) -> None:
        self._path, self.source = path, source
        self._sink: IO[bytes] = path.open("wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._batch: list[Document] = []
        self._batch_bytes = 0
        self.documents = self.bytes = 0

    def add(self, document: Document) -> None:
        size = len(document.text.encode())
        self._batch.append(document)
        self._batch_bytes += size
        self.bytes += size
        self.documents += 1
        if self._batch_bytes >= _BATCH_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        self._flush()
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        return {
            "path": self._path.name,
            "source": self.source,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": files.sha256_file(self._path),
        }

    def _flush(self) -> None:
        if self._batch:
            columns = (
                [document.text for document in self._batch],
                [document.file for document in self._batch],
                [document.row for document in self._batch],
            )
            arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
            self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._batch, self._batch_bytes = [], 0


#: ``dataset.json`` keeps this many messages about skipped damage, and counts all of it.
CORRUPT_KEPT = 20
_COUNT_EVERY = 1000


class Corrupt:
    """Counts damage that is skipped, and keeps the first messages."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def note(self, error: DataError) -> None:
        """Count one damaged row or part of a file, and keep its message."""
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

    Raises a DataError if an input is damaged, and damage is not skipped.

    Returns:
        ``files`` and ``validation`` as in ``dataset.json``; ``pieces``: for each, ``source``, ``number``, ``lines``,
        ``rows``, ``skipped_rows``, ``documents``, ``corrupt``, ``corrupt_count``.
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
    """Convert an input. One in object storage is on the disk only during the conversion."""
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


def _read(piece: Piece, lines: LineRange | None, report: Report) -> Iterator[TextRow]:
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
    """The files of one source that are used where they lie; the table also has the prepared files that follow."""

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
    """Write the tables of all sources, with the Arrow files that can be read where they lie.

    Args:
        stack: closes the tables.
        pieces: the inputs of each source.
        fraction: share of each file's rows to hold out; a source's first row is for training.
        skip: skip damage instead of raising an error.

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
    for indexed_files in spread(_index, tasks, progress):
        for file in indexed_files:
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
