"""What readers of a corpus report: damage, with file and place; and the errors that they share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from hlatctl.run.errors import DataError

#: Limit of a document, and of a line that contains one. The longest of public corpora have some 10 MB.
MAX_TEXT_BYTES = 64 << 20
#: A row's number, and its text if it has one.
Row = tuple[int, str | None]
#: Called with damage: raises it, or returns to skip the damaged part.
Report = Callable[[DataError], None]


def fail(error: DataError) -> None:
    """Raise the error: damage stops the reading."""
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
