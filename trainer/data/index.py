"""Where each text of an Arrow file lies: found from its headers, without reading or copying the text.

A text is read with two calls of ``pread``: its two offsets, then its bytes. So files are used where they lie, and
opening one costs no scan. Files whose text can't be read like this (compressed batches, views) are converted.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.damage import Report, guard
from trainer.data.formats import open_arrow

#: A record batch with rows. Positions are bytes in the file: the ``offsets`` of the texts, their ``data`` of ``size``
#: bytes, and the ``validity`` bits (-1 if no text is null). ``row`` is its first row, 0-based; ``wide`` is 1 for 64-bit
#: offsets; ``number`` counts the file's batches from 0.
BATCH = np.dtype([(name, "<i8") for name in ("row", "number", "offsets", "data", "size", "validity", "wide")])
Batches = npt.NDArray[np.void]
Rows = npt.NDArray[np.int64]
#: A buffer without bytes, and one that is not in the file as it is.
_NONE, _ELSEWHERE = -1, -2
#: A file's fingerprint covers its size, its batches and these blocks of its content.
SAMPLED_BYTES, _BLOCKS = 4096, 4
_HASHED_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """An Arrow file whose texts can be read where they lie.

    Args:
        size: of the file in bytes.
        mtime_ns: its time of change.
        rows: all rows, with and without text.
        text_bytes: UTF-8 bytes of all texts, and up to 64 bytes of padding a batch.
        batches: array of :data:`BATCH`, in order.
        fingerprint: 16 hexadecimal digits; depends on a sample of the content, never on path or time.
    """

    size: int
    mtime_ns: int
    rows: int
    text_bytes: int
    batches: Batches
    fingerprint: str


def index_file(path: Path, column: str, report: Report) -> Indexed | None:
    """Return where the texts of an Arrow file lie; None if it must be converted, or nothing of it can be read.

    Args:
        path: an Arrow file or stream.
        column: of the text.
        report: is called with damage; if it returns, the batches before the damage remain.

    Raises:
        DataError: the column is missing; or, by default, the file is damaged.
    """
    found: list[tuple[int, ...]] = []
    rows = 0
    with (
        guard(path, report, lambda: f"from row {rows + 1} on"),
        open_arrow(path, column, only_headers=True) as (read, whole),
    ):
        for number, batch in enumerate(read):
            values = batch.column(column)
            if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
                return None
            validity, offsets, data = (_place(buffer, whole) for buffer in values.buffers())
            if _ELSEWHERE in (validity, offsets, data):
                return None
            if len(values):
                size = 0 if data == _NONE else values.buffers()[2].size
                validity = validity if values.null_count else _NONE
                wide = pa.types.is_large_string(values.type)
                found.append((rows, number, offsets, max(data, 0), size, validity, wide))
                rows += len(values)
    if not found:
        return None
    batches = np.array(found, dtype=BATCH)
    status = path.stat()
    return Indexed(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        rows=rows,
        text_bytes=int(batches["size"].sum()),
        batches=batches,
        fingerprint=_fingerprint(path, status.st_size, batches),
    )


def held_out_rows(fingerprint: str, rows: int, fraction: float) -> Rows:
    """Return the rows of a file that are held out, 0-based and sorted, chosen by a hash of (file, row).

    Takes about 15 ns a row. Copies of a file hold out the same rows.

    Args:
        fingerprint: of the file.
        rows: in the file.
        fraction: to hold out, less than 1.
    """
    limit = np.uint64(int(fraction * 2**64))
    parts = [np.empty(0, dtype=np.int64)]
    for first in range(0, rows, _HASHED_ROWS):
        numbers = np.arange(first, min(first + _HASHED_ROWS, rows), dtype=np.uint64)
        parts.append(np.flatnonzero(_mixed(numbers, int(fingerprint, 16)) < limit) + first)
    return np.concatenate(parts)


def _mixed(numbers: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Return 64-bit hashes: SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _place(buffer: Any, whole: Any) -> int:
    """Return the position of a buffer in the file's."""
    if buffer is None or not buffer.size:
        return _NONE
    position = int(buffer.address - whole.address)
    return position if 0 <= position <= whole.size - buffer.size else _ELSEWHERE


def sampled_positions(size: int) -> list[int]:
    """Return where the blocks begin that the fingerprint of a file covers.

    Args:
        size: of the file in bytes.
    """
    return [size * block // _BLOCKS for block in range(_BLOCKS)]


def _fingerprint(path: Path, size: int, batches: Batches) -> str:
    digest = hashlib.sha256(size.to_bytes(8, "little") + batches.tobytes())
    with path.open("rb") as file:
        for position in sampled_positions(size):
            digest.update(os.pread(file.fileno(), SAMPLED_BYTES, position))
    return digest.hexdigest()[:16]
