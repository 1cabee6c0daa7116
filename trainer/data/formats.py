"""Read documents from files: Arrow, Parquet, JSON Lines and plain text, perhaps compressed or only a range.

A file is checked (:func:`check_file`: existence, schema, first line) before it is read (:func:`read_documents`: one
document after another in bounded memory). Both raise the same errors, and report damage with file and place. A row's
number is 1-based: the line of JSON Lines, the row of a table, the piece of a plain text. No torch, no transformers.
"""

from __future__ import annotations

import gzip
import io
import json
import mmap
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hlatctl.run import files, registry
from hlatctl.run.errors import DataError

#: Size limit of a document, and of a line that contains one. The longest of public corpora have about 10 MB.
MAX_TEXT_BYTES = 64 << 20
#: A row's number, and its text if it has one.
TextRow = tuple[int, str | None]
#: Called with damage: raises it, or returns to skip the damaged part.
Report = Callable[[DataError], None]


def fail(error: DataError) -> None:
    """Raise the error, so that damage stops the reading."""
    raise error


@contextmanager
def guard(path: Path, report: Report, where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Report an error inside a reader with file and place; the rest of the block is skipped."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error, _zstd_error()) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"{path}: truncated or damaged {where()}".rstrip()
        report(DataError(f"{message} ({reason})", hint="copy the file again, or set data.on_corrupt=skip"))


def _zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    """Return the error of text that is not UTF-8."""
    return DataError(f"{where}: not UTF-8 text (byte {error.start})", hint="convert the file to UTF-8")


def too_long(where: str, size_bytes: int) -> DataError:
    """Return the error of a document that is larger than a process should hold."""
    return DataError(
        f"{where}: the document has {size_bytes:,} bytes, the limit is {MAX_TEXT_BYTES:,}",
        hint="split it, or set data.on_corrupt=skip",
    )


def no_column(where: str, column: str, names: list[str]) -> DataError:
    """Return the error of a file or row without the configured column."""
    return DataError(
        f"{where}: data.text_column='{column}' is not there; it has: {', '.join(names)}",
        hint=f"set data.text_column={names[0]}" if len(names) == 1 else "set data.text_column to one of them",
    )


_BLOCK_BYTES = 1 << 20
#: Limit of a compressed line that is skipped; with a longer one, the rest of its file is damaged.
_MAX_UNPACKED_BYTES = 1 << 30


@contextmanager
def open_lines(path: Path) -> Iterator[Iterable[tuple[bytes, int]]]:
    """Open a file's lines, decompressed, as :func:`hlatctl.run.files.lines` yields them.

    Only a line feed ends one; a carriage return is part of the text.
    """
    name = path.name.lower()
    with path.open("rb") as raw:
        stream: Any = raw
        if name.endswith(".gz"):
            stream = gzip.GzipFile(fileobj=raw)
        elif name.endswith(".zst"):
            import zstandard

            unpacked = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            stream = io.BufferedReader(unpacked)
        yield files.lines(stream, MAX_TEXT_BYTES, None if stream is raw else _MAX_UNPACKED_BYTES)


class LineRange:
    """The lines of an uncompressed file that begin in a range of bytes, without the byte at ``end``."""

    def __init__(self, path: Path, start: int, end: int) -> None:
        self.path, self._start, self._end = path, start, end
        self.count = self.read_bytes = 0
        """Number of lines read so far, and their bytes."""

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        with self.path.open("rb") as file:
            position = max(0, self._start - 1)
            file.seek(position)
            lines = files.lines(file, MAX_TEXT_BYTES)
            if self._start:
                position += next(lines, (b"", 0))[1]
            while position < self._end and (found := next(lines, None)):
                position += found[1]
                self.count += 1
                self.read_bytes += found[1]
                yield found

    @cached_property
    def before(self) -> int:
        """Return the number of lines before the range; this reads all of them."""
        with self.path.open("rb") as file:
            blocks = iter(lambda: file.read(min(_BLOCK_BYTES, self._start - file.tell())), b"")
            last, count = b"\n", 0
            for last in blocks:
                count += last.count(b"\n")
            return count + (not last.endswith(b"\n"))  # a line that begins before the range is not part of it


def read_lines(lines: LineRange, column: str, report: Report) -> Iterator[TextRow]:
    """Yield the rows of JSON Lines in a range; their numbers count from its first line. See :func:`read_documents`."""
    yield from json_rows(lines.path, lines, column, report, lambda: lines.before)


def json_rows(
    path: Path, lines: Iterable[tuple[bytes, int]], column: str, report: Report, before: Callable[[], int] = lambda: 0
) -> Iterator[TextRow]:
    """Yield the rows of lines; ``before`` returns the number of the file's lines before them, for messages."""
    number = 0

    def where() -> str:
        return f"{path}:{before() + number}"

    with guard(path, report, lambda: f"after line {before() + number}"):
        for number, (line, length) in enumerate(lines, start=1):
            if length > MAX_TEXT_BYTES:
                report(too_long(where(), length))
            elif line.strip():
                try:
                    text = _json_document(line, column, where)
                except DataError as error:
                    report(error)
                else:
                    yield number, text


def _json_document(line: bytes, column: str, where: Callable[[], str]) -> str | None:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(where(), error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where()}: not a JSON value ({str(error)[:200]})", hint="JSON Lines has one object on every line"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{where()}: is {type(row).__name__}, must be an object with the field '{column}'")
    if column not in row:
        raise no_column(where(), column, list(row))
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where()}: field '{column}' is {type(text).__name__}, must be text")
    return text


#: A plain text file is cut at the first line end after this many bytes.
TEXT_DOCUMENT_BYTES = 64 * 1024
_BATCH_ROWS = 1024
#: Rows of Parquet decoded in one batch: each can be the same long entry of a dictionary.
_PARQUET_ROWS = 64
#: Rows of a larger dictionary are decoded one by one, which is slow. Writers stop at 1 MiB, after whole batches.
_DICTIONARY_BYTES = 16 << 20
_DICTIONARY_PAGE = 2
#: The header's first two numbers, the page's kind and its size unpacked, take at most 12.
_PAGE_HEADER_BYTES = 16
_CARDS = {"README.md", "README.rst"}
_ARROW_FILE_MAGIC = b"ARROW1"
#: Position of the stream in an Arrow file, after the magic and two bytes of padding.
_ARROW_STREAM_START = 8


@dataclass(frozen=True, kw_only=True)
class DataFormat(registry.Row):
    """A format of documents: ``code(path, column, report)`` yields a file's rows, as :func:`read_documents`.

    Args:
        check: ``check(path, column)`` checks a file without reading its documents; empty: the first row is read.
        has_columns: its documents are in a column, so such files can't be in a folder of token ids.
        is_arrow: the loader reads its rows in place; other formats are converted.
    """

    check: str = ""
    has_columns: bool = False
    is_arrow: bool = False


_ARROW = DataFormat(code=f"{__name__}:_read_arrow", check=f"{__name__}:_check_arrow", has_columns=True, is_arrow=True)
_PARQUET = DataFormat(code=f"{__name__}:_read_parquet", check=f"{__name__}:_check_parquet", has_columns=True)
_LINES = DataFormat(code=f"{__name__}:_read_jsonl", has_columns=True)
_TEXT = DataFormat(code=f"{__name__}:_read_text")
#: By the ending of a file's name, without its dot.
FORMATS = registry.Registry(
    "format of data.path",
    "hlatctl.data_formats",
    DataFormat,
    {
        **dict.fromkeys(("arrow", "feather", "ipc"), _ARROW),
        "parquet": _PARQUET,
        **dict.fromkeys(("jsonl", "json", "jsonl.gz", "json.gz", "jsonl.zst", "json.zst"), _LINES),
        **dict.fromkeys(("txt", "text", "md", "markdown", "rst", "adoc", "asciidoc", "org", "tex"), _TEXT),
    },
)


def find_files(path: Path) -> list[Path]:
    """Return the readable files at ``data.path``: the file itself, or those below the folder in order of name.

    Raises a DataError if the path is missing, the folder is empty, or no file has a known format.
    """
    known = ", ".join(f".{ending}" for ending in FORMATS)
    try:
        if path.is_file():
            if format_of(path):
                return [path]
            raise DataError(f"data.path={path}: unknown format", hint=f"known file names end in: {known}")
        if not path.is_dir():
            raise DataError(f"data.path={path}: no such file or folder", hint="correct data.path")
        files = [Path(name) for name in sorted(_files_below(path), key=lambda name: name.split(os.sep))]
    except PermissionError as error:
        raise DataError(f"data.path={path}: not readable ({error.strerror})") from None
    if not files:
        raise DataError(f"data.path={path}: the folder is empty", hint=f"it must contain files that end in: {known}")
    known_files = [p for p in files if format_of(p)]
    # At the top of a folder a README describes the corpus: every dataset from the Hugging Face hub has one.
    readable = [p for p in known_files if p.parent != path or p.name not in _CARDS] or known_files
    if not readable:
        raise DataError(
            f"data.path={path}: none of its {len(files)} files has a known format ({files[0].name}, …)",
            hint=f"known file names end in: {known}",
        )
    return readable


def unread_files(path: Path, read: Collection[Path]) -> dict[str, int]:
    """Count the files below a folder that aren't among the read ones, by suffix, without hidden ones."""
    others = map(Path, _files_below(path))
    return dict(Counter(p.suffix or p.name for p in others if p not in read))


def format_of(path: Path) -> DataFormat | None:
    """Return the format by the file's name; None if it has no known ending."""
    ending = _ending(path)
    return FORMATS[ending] if ending else None


def _ending(path: Path) -> str:
    parts = path.name.lower().split(".")
    endings = (".".join(parts[start:]) for start in range(1, len(parts)))
    return next((ending for ending in endings if ending in FORMATS), "")


def check_file(path: Path, column: str, report: Report = fail) -> bool:
    """Check a file's head or foot; return whether the file can be read at least in part.

    Raises:
        DataError: it lacks the column; or, by default, it can't be read.
    """
    with guard(path, report):
        if path.stat().st_size == 0:
            report(DataError(f"{path}: the file is empty"))
            return False
        check = FORMATS.part(_ending(path), "check")
        if check is None:
            return next(read_documents(path, column, report), None) is not None
        check(path, column)
        return True
    return False


def read_documents(path: Path, column: str, report: Report = fail) -> Iterator[TextRow]:
    """Yield a file's rows in order; a null is a row without text.

    Args:
        column: the text column.
        report: called with damage; if it returns, the damaged part is skipped.

    Raises:
        DataError: the column is missing; or, by default, the first damage, with file and row.
    """
    with guard(path, report):
        yield from FORMATS.create(_ending(path), path, column, report)


def _check_parquet(path: Path, column: str) -> None:
    check_schema(path, pq.read_schema(path), column)


def _check_arrow(path: Path, column: str) -> None:
    with open_arrow(path, column, only_headers=True):
        pass


def _read_parquet(path: Path, column: str, report: Report) -> Iterator[TextRow]:
    """Read row group by row group: damage skips the rest of its group."""
    with pq.ParquetFile(path, memory_map=True) as file:
        check_schema(path, file.schema_arrow, column)
        as_dictionary = [column] if _largest_dictionary(path, file, column) > _DICTIONARY_BYTES else None
    with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True, read_dictionary=as_dictionary) as file:
        first = 1
        for group in range(file.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows - 1
            batches = file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[column])
            yield from _group_rows(path, batches, first, last, report)
            first = last + 1


def _largest_dictionary(path: Path, file: Any, column: str) -> int:
    """Return a column's largest dictionary in bytes, according to the page headers, which readers obey."""
    index = next(i for i in range(len(file.schema)) if file.schema.column(i).path == column)
    largest = 0
    with path.open("rb") as raw:
        for group in range(file.num_row_groups):
            chunk = file.metadata.row_group(group).column(index)
            raw.seek(min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset))
            header = io.BytesIO(raw.read(_PAGE_HEADER_BYTES))
            if _number(header) == _DICTIONARY_PAGE:
                largest = max(largest, _number(header))
    return largest


def _number(header: io.BytesIO) -> int:
    """Return the next field of a page's header, in Thrift's compact form; -1 if it isn't a number."""
    if header.read(1) != b"\x15":  # the next field, of 32 bits
        return -1
    value = shift = 0
    while byte := header.read(1):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
    return value >> 1


def _group_rows(path: Path, batches: Iterator[Any], first: int, last: int, report: Report) -> Iterator[TextRow]:
    row = first
    with guard(path, report, lambda: f"in rows {row} to {last}"):
        for batch in batches:
            yield from _column_rows(path, batch.column(0), row, report)
            row += len(batch)


def _read_arrow(path: Path, column: str, report: Report) -> Iterator[TextRow]:
    """Read batch by batch; a stream has no index, so damage skips the rest."""
    with open_arrow(path, column) as (batches, _):
        first = 1
        with guard(path, report, lambda: f"from row {first} on"):
            for batch in batches:
                values = batch.column(column)
                # Arrow trusts offsets; a damaged one would read anywhere. As binary: text is decoded row by row.
                values.cast(pa.large_binary()).validate(full=True)
                for start in range(0, len(values), _BATCH_ROWS):
                    yield from _column_rows(path, values.slice(start, _BATCH_ROWS), first + start, report)
                first += len(values)


def _column_rows(path: Path, values: pa.Array, first: int, report: Report) -> Iterator[TextRow]:
    if pa.types.is_dictionary(values.type):
        yield from _dictionary_rows(path, values, first, report)
        return
    if pa.types.is_string_view(values.type):
        values = values.cast(pa.large_binary()).view(pa.large_string())
    import pyarrow.compute as pc  # 60 ms, which only such files need

    lengths = pc.binary_length(values)
    if (pc.max(lengths).as_py() or 0) > MAX_TEXT_BYTES:
        yield from _dictionary_rows(path, values.dictionary_encode(), first, report)
        return
    try:
        texts = values.to_pylist()
    except UnicodeDecodeError:
        yield from _decodable_rows(path, values, first, report)
    else:
        yield from enumerate(texts, start=first)


def _dictionary_rows(path: Path, values: pa.Array, first: int, report: Report) -> Iterator[TextRow]:
    """Yield rows one by one, rejecting texts that are too long."""
    import pyarrow.compute as pc  # 60 ms, which only such files need

    lengths = pc.binary_length(values.dictionary).to_pylist()
    for number, entry in enumerate(values.indices.to_pylist(), start=first):
        length = 0 if entry is None else lengths[entry] or 0
        try:
            if length > MAX_TEXT_BYTES:
                raise too_long(f"{path}:{number}", length)
            yield number, None if entry is None else values.dictionary[entry].as_py()
        except DataError as error:
            report(error)
        except UnicodeDecodeError as error:
            report(not_utf8(f"{path}:{number}", error))


def _decodable_rows(path: Path, values: pa.Array, first: int, report: Report) -> Iterator[TextRow]:
    for number, value in enumerate(values, start=first):
        try:
            yield number, value.as_py()
        except UnicodeDecodeError as error:
            report(not_utf8(f"{path}:{number}", error))


def _read_jsonl(path: Path, column: str, report: Report) -> Iterator[TextRow]:
    with open_lines(path) as lines:
        yield from json_rows(path, lines, column, report)


def _read_text(path: Path, column: str, report: Report) -> Iterator[TextRow]:
    del column  # a plain text file has none
    with open_lines(path) as lines:
        yield from enumerate(cut(_decoded(path, lines, report), TEXT_DOCUMENT_BYTES), start=1)


def _decoded(path: Path, lines: Iterable[tuple[bytes, int]], report: Report) -> Iterator[str]:
    for number, (line, length) in enumerate(lines, start=1):
        if length > MAX_TEXT_BYTES:
            report(too_long(f"{path}:{number}", length))
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            report(not_utf8(f"{path}:{number}", error))
        else:
            yield text


def cut(lines: Iterable[str], document_bytes: int) -> Iterator[str]:
    """Join lines to documents; each ends with the first line end after this many UTF-8 bytes."""
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
def open_arrow(path: Path, column: str, *, only_headers: bool = False) -> Iterator[tuple[Any, Any]]:
    """Map an Arrow file or stream into memory; yield its batches, and a buffer of the whole file.

    A file is read as the stream that it contains. pyarrow's reader of files asks the kernel to read all batches ahead,
    and starts threads.

    Args:
        column: the text column.
        only_headers: tell the kernel not to read ahead.

    Raises:
        DataError: the column is missing, or is not text.
        pa.ArrowException: it is not an Arrow file.
    """
    if not path.stat().st_size:
        raise pa.ArrowInvalid("the file is empty")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if only_headers:
        mapped.madvise(mmap.MADV_RANDOM)
    whole = stream = pa.py_buffer(mapped)
    if mapped[: len(_ARROW_FILE_MAGIC)] == _ARROW_FILE_MAGIC:
        if mapped[-len(_ARROW_FILE_MAGIC) :] != _ARROW_FILE_MAGIC:
            raise pa.ArrowInvalid("its end is missing")
        stream = whole[_ARROW_STREAM_START:]
    with pa.ipc.open_stream(stream) as batches:
        check_schema(path, batches.schema, column)
        yield batches, whole


def check_schema(path: Path, schema: pa.Schema, column: str) -> None:
    """Raise a DataError if the column is missing or is not text."""
    if column not in schema.names:
        raise no_column(str(path), column, schema.names)
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"{path}: column '{column}' is {kind}, must be text", hint="choose another data.text_column")


def _files_below(folder: str | Path) -> Iterator[str]:
    """Yield the paths of the files below a folder, without hidden ones and hidden folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "_")):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            elif entry.is_file():
                yield entry.path
