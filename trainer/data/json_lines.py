"""Read lines of a file, decompressed or in a range, and documents from JSON Lines."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from hlatctl.run import reading
from hlatctl.run.errors import DataError
from trainer.data.damage import MAX_TEXT_BYTES, Report, Row, guard, no_column, not_utf8, too_long

_BLOCK_BYTES = 1 << 20


@contextmanager
def open_lines(path: Path) -> Iterator[Iterable[tuple[bytes, int]]]:
    """Open a file's lines, decompressed, as :func:`hlatctl.run.reading.lines` yields them.

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
        yield reading.lines(stream, MAX_TEXT_BYTES)


class LineRange:
    """The lines of a file that begin in a range of bytes.

    Args:
        path: of an uncompressed file.
        start: first byte.
        end: byte after the last one.
    """

    def __init__(self, path: Path, start: int, end: int) -> None:
        self.path, self._start, self._end = path, start, end
        self.count = self.read_bytes = 0
        """Number of lines read so far, and their bytes."""

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        with self.path.open("rb") as file:
            position = max(0, self._start - 1)
            file.seek(position)
            lines = reading.lines(file, MAX_TEXT_BYTES)
            if self._start:
                position += next(lines, (b"", 0))[1]
            while position < self._end and (found := next(lines, None)):
                position += found[1]
                self.count += 1
                self.read_bytes += found[1]
                yield found

    @cached_property
    def before(self) -> int:
        """The number of lines before the range; reads all of them."""
        with self.path.open("rb") as file:
            blocks = iter(lambda: file.read(min(_BLOCK_BYTES, self._start - file.tell())), b"")
            last, count = b"\n", 0
            for last in blocks:
                count += last.count(b"\n")
            return count + (not last.endswith(b"\n"))  # a line that begins before the range is not part of it


def read_lines(lines: LineRange, column: str, report: Report) -> Iterator[Row]:
    """Yield the rows of JSON Lines in a range; their numbers count from its first line. See :func:`read_documents`."""
    yield from json_rows(lines.path, lines, column, report, lambda: lines.before)


def json_rows(
    path: Path, lines: Iterable[tuple[bytes, int]], column: str, report: Report, before: Callable[[], int] = lambda: 0
) -> Iterator[Row]:
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
