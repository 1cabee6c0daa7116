"""Reads JSON, lines and files that may be damaged or endless, and turns everything wrong into one kind of error."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hlatctl.run.errors import DamagedFileError, HlatctlError

#: Exceptions of reading a damaged record: a missing key, a value of another type, a huge number.
DAMAGED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
#: Files of this project are nested at most 10 deep. Code that walks through a value can rely on this limit.
_MAX_DEPTH = 100
#: No count, size or seed is larger; 2**64 has 20 digits. Every smaller number fits in a float.
_MAX_INT = 2**64
_MAX_INT_DIGITS = 20
#: Limit of a file that is read as a whole, unless its reader names another one. A tokenizer of 1M words is smaller.
MAX_FILE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_LINE_FEED = 10


def parse_json(text: str | bytes, *, any_number: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: bytes must be UTF-8.
        any_number: also accept what other programs write: integers of any size, ``1e999``, ``NaN`` and ``Infinity``.

    Raises:
        ValueError: it is not JSON or not UTF-8, is nested too deep, or has a number out of range.
    """
    decoder = _ANY_NUMBER if any_number else _STRICT
    try:
        value = decoder.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    return value


def read_bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Return a regular file's content. Refuses a FIFO, which would block forever, and a file that fills the memory.

    Args:
        path: of the file.
        most: limit of its size in bytes.

    Raises:
        OSError: it is missing, too large, is no regular file, or can't be read.
    """
    with open(path, "rb", opener=open_regular) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size_bytes <= most else b""  # the kernel's files and growing ones have more
        if size_bytes > most or len(content) > most:
            raise _too_large(path, max(size_bytes, len(content)), most)
        return content


def read_text(path: Path, most: int = MAX_FILE_BYTES) -> str:
    """Return a regular file's content as UTF-8 text.

    Raises:
        OSError: it is missing, too large, is no regular file, or can't be read.
        ValueError: it is not UTF-8.
    """
    return read_bytes(path, most).decode()


def check_size(path: Path, most: int = MAX_FILE_BYTES) -> None:
    """Refuse a file that is too large, before a library reads it as a whole.

    Raises:
        OSError: it is missing, too large, or is no regular file.
    """
    with open(path, "rb", opener=open_regular) as file:
        size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes > most:
        raise _too_large(path, size_bytes, most)


def lines(file: IO[bytes], most: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file, each with its length in bytes, in bounded memory.

    Of a longer line than ``most`` bytes, its beginning is yielded, and its line feed if it has one.

    Args:
        file: also a decompressed one.
        most: bytes of a line that are kept.
    """
    while line := file.readline(most + 1):
        length = len(line)
        if length > most and line[-1] != _LINE_FEED:
            while block := file.readline(_BLOCK_BYTES):
                length += len(block)
                if block[-1] == _LINE_FEED:
                    line += b"\n"
                    break
        yield line, length


def open_regular(path: str, flags: int) -> int:
    """Open a regular file without blocking: ``open(path, opener=open_regular)``.

    Raises:
        OSError: it is missing, is no regular file, or can't be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is a folder" if stat.S_ISDIR(mode) else "is not a regular file", path)
    return descriptor


@contextmanager
def reading(path: Path, hint: str = "") -> Iterator[None]:
    """Turn every error of reading a file or its values into one that names the file.

    Raises:
        DamagedFileError: the file is missing, can't be read, or doesn't contain what the block expects.
    """
    try:
        yield
    except HlatctlError:
        raise
    except (OSError, *DAMAGED) as error:
        raise DamagedFileError(f"{path}: can't be used ({why(error)})", hint=hint) from None


def why(error: Exception) -> str:
    """Return an exception's message for a person. For a ``KeyError`` it says that the key is missing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _too_large(path: Path, size_bytes: int, most: int) -> OSError:
    message = f"has {size_bytes:,} bytes, the limit is {most:,}"
    return OSError(errno.EFBIG, message, os.fspath(path))


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        items = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"is nested deeper than {_MAX_DEPTH} levels")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS + 1 or abs(int(text)) > _MAX_INT:
        raise ValueError(f"the number {text[:20]}… is out of range")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


_STRICT = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_no_constant)
_ANY_NUMBER = json.JSONDecoder()
