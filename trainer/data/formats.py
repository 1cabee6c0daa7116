"""Reading documents from files: Arrow, Parquet, JSON Lines and plain text. What to do with them is not here.

A file is looked at (:func:`check_file`: existence, schema, first line) before it is read (:func:`read_documents`:
one document after another in bounded memory); both raise the same errors. No torch, no transformers.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from hlatctl.run.errors import DataError

#: A plain text file is cut at the first line end after this many bytes.
TEXT_DOCUMENT_BYTES = 64 * 1024
_BATCH_ROWS = 1024
_ARROW_FILE_MAGIC = b"ARROW1"
_FORMATS = {
    ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow", ".parquet": "parquet",
    ".jsonl": "jsonl", ".json": "jsonl", ".jsonl.gz": "jsonl", ".json.gz": "jsonl", ".jsonl.zst": "jsonl",
    ".json.zst": "jsonl", ".txt": "text",
}  # fmt: skip


def find_files(path: Path) -> list[Path]:
    """The readable files at ``data.path``: the file itself, or those below the folder in order of name.

    Raises:
        DataError: nothing there, an empty folder, or no file of a known format.
    """
    known = ", ".join(_FORMATS)
    try:
        if path.is_file():
            if format_of(path):
                return [path]
            raise DataError(f"data.path={path}: unknown format", hint=f"known file names end in: {known}")
        if not path.is_dir():
            raise DataError(f"data.path={path}: no such file or folder", hint="correct data.path")
        files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
    except PermissionError as error:
        raise DataError(f"data.path={path}: not readable ({error.strerror})") from None
    if not files:
        raise DataError(f"data.path={path}: the folder is empty", hint=f"it must hold files that end in: {known}")
    readable = [p for p in files if format_of(p)]
    if not readable:
        raise DataError(
            f"data.path={path}: none of its {len(files)} files has a known format ({files[0].name}, …)",
            hint=f"known file names end in: {known}",
        )
    return readable


def format_of(path: Path) -> str | None:
    """``arrow``, ``parquet``, ``jsonl`` or ``text`` by the file's name; None if it is none of them."""
    name = path.name.lower()
    return next((kind for ending, kind in _FORMATS.items() if name.endswith(ending)), None)


def check_file(path: Path, column: str) -> None:
    """Look at a file's head, or foot: it can be read and has the column.

    Raises:
        DataError: it can't, or has not.
    """
    with _readable(path):
        kind = format_of(path)
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        if kind == "parquet":
            _check_schema(path, pq.read_schema(path), column)
        elif kind == "arrow":
            with _open_arrow(path) as reader:
                _check_schema(path, reader.schema, column)
        else:
            next(read_documents(path, column), None)


def read_documents(path: Path, column: str) -> Iterator[str | None]:
    """A file's documents in order; a null is a row without text.

    Raises:
        DataError: the file is damaged, or has no such column; names file, and line where there is one.
    """
    readers = {"parquet": _read_parquet, "arrow": _read_arrow, "jsonl": _read_jsonl, "text": _read_text}
    with _readable(path):
        yield from readers[format_of(path) or ""](path, column)


def _read_parquet(path: Path, column: str) -> Iterator[str | None]:
    with pq.ParquetFile(path) as file:
        _check_schema(path, file.schema_arrow, column)
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
            yield from batch.column(0).to_pylist()


def _read_arrow(path: Path, column: str) -> Iterator[str | None]:
    with _open_arrow(path) as reader:
        _check_schema(path, reader.schema, column)
        is_file = isinstance(reader, pa.RecordBatchFileReader)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            values = batch.column(column)
            for start in range(0, len(values), _BATCH_ROWS):
                yield from values.slice(start, _BATCH_ROWS).to_pylist()


def _read_jsonl(path: Path, column: str) -> Iterator[str | None]:
    with _open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_document(path, number, line, column)


def _json_document(path: Path, number: int, line: str, column: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{path}:{number}: not a JSON value ({error})", hint="JSON Lines has one object on every line"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: is {type(row).__name__}, must be an object with the field '{column}'")
    if column not in row:
        raise _no_column(f"{path}:{number}", column, list(row))
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{path}:{number}: field '{column}' is {type(text).__name__}, must be text")
    return text


def _read_text(path: Path, column: str) -> Iterator[str]:
    del column  # a plain text file has none
    with _open_text(path) as lines:
        yield from cut(lines, TEXT_DOCUMENT_BYTES)


def cut(lines: Iterable[str], document_bytes: int) -> Iterator[str]:
    """Lines joined to documents, each ended by the first line end after so many UTF-8 bytes."""
    part: list[str] = []
    size = 0
    for line in lines:
        part.append(line)
        size += len(line.encode())
        if size >= document_bytes:
            yield "".join(part)
            part, size = [], 0
    if part:
        yield "".join(part)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside a reader into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})", hint="convert the file to UTF-8") from None
    except (pa.ArrowException, OSError, EOFError, _zstd_error()) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: truncated or damaged ({reason})", hint="copy the file again") from None


def _zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    name = path.name.lower()
    with path.open("rb") as raw:
        stream: Any = raw
        if name.endswith(".gz"):
            stream = gzip.GzipFile(fileobj=raw)
        elif name.endswith(".zst"):
            import zstandard

            stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        # Only "\n" ends a line of JSON Lines; a carriage return in a text document is part of it.
        with io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as lines:
            yield lines


@contextmanager
def _open_arrow(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as source:
        is_file = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            yield reader


def _check_schema(path: Path, schema: pa.Schema, column: str) -> None:
    if column not in schema.names:
        raise _no_column(str(path), column, schema.names)
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"{path}: column '{column}' is {kind}, must be text", hint="choose another data.text_column")


def _no_column(where: str, column: str, names: list[str]) -> DataError:
    return DataError(
        f"{where}: data.text_column='{column}' is not there; it has: {', '.join(names)}",
        hint=f"set data.text_column={names[0]}" if len(names) == 1 else "set data.text_column to one of them",
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
