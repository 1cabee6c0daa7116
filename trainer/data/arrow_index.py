"""Read texts of Arrow files where they lie, from an index of their positions that is kept on disk.

A file is indexed from its headers, without reading or copying the text. Then a text is read with two calls of
``pread``: its two offsets, then its bytes. So opening a file costs no scan. Files whose text can't be read like this
(compressed batches, views) are converted.

``Table`` is the index of a source: its files, the batches of each, and which documents are held out. Three arrays
without headers are appended while the corpus is prepared and mapped into memory when it is read. 10,000 files of 5 MB
take 1 MB. Numbers are 64-bit and little-endian.

A file in object storage is indexed through a stand-in: ``fill_headers`` fetches only its headers. Messages and footer
are parsed as the format defines them (apache/arrow, ``format/Message.fbs`` and ``File.fbs``), because pyarrow can't
locate messages without reading the content. Recently used offsets of such files stay in memory.
"""

from __future__ import annotations

import hashlib
import os
import resource
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hlatctl.run import files
from hlatctl.run.errors import DataError
from trainer.data.formats import Report, fail, guard, open_arrow
from trainer.data.remote import PREPARE_AGAIN, RemoteObject, remote_of, set_time, spread_requests

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
        size: bytes of the file.
        mtime_ns: its modification time.
        rows: number of rows, with and without text.
        text_bytes: UTF-8 bytes of all texts, and up to 64 bytes of padding a batch.
        batches: array of :data:`BATCH`, in order.
        fingerprint: 16 hexadecimal digits, from a sample of the content; independent of path and time.
    """

    size: int
    mtime_ns: int
    rows: int
    text_bytes: int
    batches: Batches
    fingerprint: str


def index_file(path: Path, column: str, report: Report) -> Indexed | None:
    """Return the index of an Arrow file or stream; None if it must be converted, or no part of it can be read.

    Args:
        column: the text column.
        report: called with damage; if it returns, the batches before the damage remain.

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

    Takes about 15 ns a row. Copies of a file hold out the same rows. ``fraction`` is less than 1.
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
    if buffer is None or not buffer.size:
        return _NONE
    position = int(buffer.address - whole.address)
    return position if 0 <= position <= whole.size - buffer.size else _ELSEWHERE


def sampled_positions(size: int) -> list[int]:
    """Return where the blocks begin that the fingerprint of a file covers; ``size`` is in bytes."""
    return [size * block // _BLOCKS for block in range(_BLOCKS)]


def _fingerprint(path: Path, size: int, batches: Batches) -> str:
    digest = hashlib.sha256(size.to_bytes(8, "little") + batches.tobytes())
    with path.open("rb") as file:
        for position in sampled_positions(size):
            digest.update(os.pread(file.fileno(), SAMPLED_BYTES, position))
    return digest.hexdigest()[:16]


#: A file: its first document, 0-based in the source, with held-out ones; the number of its first batch; its ``size`` in
#: bytes and modification time (-1: not checked, for prepared files); and its position in the source's inputs, or
#: -1 - k for the k-th prepared file.
FILE = np.dtype([(name, "<i8") for name in ("first", "batch", "size", "mtime_ns", "input")])
_KINDS: dict[str, Any] = {"files": FILE, "batches": BATCH, "skips": np.dtype("<i8")}


@dataclass(frozen=True)
class Table:
    """The files of a source.

    Args:
        starts: the first document of each file; at the end, the number of documents.
        files: array of :data:`FILE`.
        batches: batches of all files.
        skips: for each held-out document, the number of training documents before it.
    """

    starts: list[int]
    files: npt.NDArray[np.void]
    batches: Batches
    skips: Rows

    def document(self, position: int) -> int:
        """Return the number among all documents of the training document at a position; O(log n)."""
        return position + int(self.skips.searchsorted(position, side="right"))

    def find(self, document: int) -> tuple[int, int]:
        """Return a document's file and its 0-based row there; O(log n)."""
        number = bisect_right(self.starts, document) - 1
        return number, document - self.starts[number]

    def batches_of(self, number: int) -> Batches:
        """Return the batches of a file."""
        end = self.files["batch"][number + 1] if number + 1 < len(self.files) else len(self.batches)
        return self.batches[self.files["batch"][number] : end]

    @property
    def held_out(self) -> Rows:
        """Positions of the held-out documents."""
        return self.skips + np.arange(len(self.skips))


class TableWriter:
    """Appends files to the table of a source, whose files begin with ``name``; only counts are kept in memory."""

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = {kind: folder / f"{name}-{kind}.bin" for kind in _KINDS}
        self._stack = ExitStack()
        self._out = {kind: self._stack.enter_context(path.open("wb")) for kind, path in self._paths.items()}
        self.documents = self.held_out = self.batches = 0

    def add(self, file: Indexed, number: int, held_out: Rows, *, checked: bool) -> None:
        """Append a file.

        Args:
            number: its position in the source's inputs, or -1 - k.
            held_out: held-out rows, sorted.
            checked: refuse the file if its size or modification time differ when it is opened.
        """
        size, mtime_ns = (file.size, file.mtime_ns) if checked else (-1, -1)
        row = np.array([(self.documents, self.batches, size, mtime_ns, number)], dtype=FILE)
        skips = held_out + self.documents - self.held_out - np.arange(len(held_out))
        for kind, array in (("files", row), ("batches", file.batches), ("skips", skips.astype("<i8"))):
            self._out[kind].write(array.tobytes())
        self.documents += file.rows
        self.held_out += len(held_out)
        self.batches += len(file.batches)

    def hold_out_last(self) -> None:
        """Hold out the last document if no document of the table is held out."""
        self._out["skips"].write(np.array([self.documents - 1], dtype="<i8").tobytes())
        self.held_out = 1

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def describe(self) -> dict[str, Any]:
        """Return the description of the closed files for ``dataset.json``: rows, and a checksum of each file."""
        sums = {kind: {"path": path.name, "sha256": files.sha256_file(path)} for kind, path in self._paths.items()}
        return {"rows": self.documents, **sums}


def load_table(description: Mapping[str, Any]) -> Table:
    """Map the table of a ``dataset.json`` into memory. Raises a DataError if a file is missing or damaged."""
    arrays = {kind: _mapped(dtype, **description[kind]) for kind, dtype in _KINDS.items()}
    starts = [*arrays["files"]["first"].tolist(), int(description["rows"])]
    return Table(starts, arrays["files"], arrays["batches"], arrays["skips"])


def _mapped(dtype: Any, *, path: str, sha256: str) -> Any:
    try:
        if files.sha256_file(Path(path)) != sha256:
            raise DataError(f"{path}: the index of the corpus is damaged (its checksum differs)", hint=PREPARE_AGAIN)
        if not Path(path).stat().st_size:
            return np.empty(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: the index of the corpus is missing or damaged ({error})", hint=PREPARE_AGAIN
        ) from None


#: A block has the offsets of 1,000 to 2,000 texts. All blocks of a process take 64 MiB, which suffices for 10 million
#: documents or more. With larger corpora, more and more documents take two requests instead of one.
_BLOCK_BYTES, _MOST_BLOCKS = 8 << 10, 8 << 10


def read_in_blocks(remote: RemoteObject, position: int, size: int) -> bytes:
    """Return bytes of an object from its recently used blocks; raises as :meth:`RemoteObject.read`."""
    first, last = position // _BLOCK_BYTES, (position + size - 1) // _BLOCK_BYTES
    whole = b"".join(_block(remote, number) for number in range(first, last + 1))
    start = position - first * _BLOCK_BYTES
    if len(whole) < start + size:
        return remote.read(position, size)  # raises: the range is outside the object
    return whole[start : start + size]


@lru_cache(maxsize=_MOST_BLOCKS)
def _block(remote: RemoteObject, number: int) -> bytes:
    start = number * _BLOCK_BYTES
    return remote.read(start, max(0, min(_BLOCK_BYTES, remote.size - start)))


#: Column of the text in prepared files.
PREPARED_COLUMN = "text"
_CHANGED_HINT = "restore the file; or index the changed corpus: `hlatctl resume`, which compares it with the run's"
_DAMAGED_HINT = "copy the file again, or set data.on_corrupt=skip"
#: Maximum of open files, absolute and as a share of the process's limit.
_MOST_OPEN, _OPEN_SHARE = 1024, 4


class TextFile:
    """An open Arrow file whose batches are known.

    Raises a DataError if the file is missing, or has changed since it was indexed.

    Args:
        path: the file; a stand-in's file is read from its object, which detects changes itself.
        batches: its batches.
        size: required size in bytes; -1: any.
        mtime_ns: required modification time; -1: any.
        report: called with a damaged document; if it returns, the document has no text.
    """

    def __init__(self, path: str, batches: Batches, *, size: int, mtime_ns: int, report: Report = fail) -> None:
        self._path, self._report, self._prepared = path, report, mtime_ns == -1
        self.batches, self._rows = batches, batches["row"]
        self._remote = remote_of(path)
        if self._remote is not None:
            self._path = self._remote.url
            return
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        if not self._prepared and (status.st_size, status.st_mtime_ns) != (size, mtime_ns):
            what = f"{status.st_size:,} bytes, was {size:,}" if status.st_size != size else "its time of change"
            raise DataError(f"{path}: has changed since it was indexed ({what})", hint=_CHANGED_HINT)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            close(self._descriptor)

    def batch(self, row: int) -> Any:
        """Return the batch of a row."""
        return self.batches[self._rows.searchsorted(row, side="right") - 1]

    def text(self, row: int) -> str:
        """Return the text of a 0-based row; empty if it has none.

        Raises:
            DataError: by default, if it is damaged.
        """
        first, _, offsets, data, size, validity, wide = self.batch(row).item()
        at = row - first
        if validity >= 0 and not self._read_place(1, validity + at // 8)[0] >> at % 8 & 1:
            return ""
        width, form = (8, "<qq") if wide else (4, "<ii")
        start, end = struct.unpack(form, self._read_place(2 * width, offsets + width * at))
        if not 0 <= start <= end <= size:
            self._report(self._damaged(row, f"its text begins at {start} and ends at {end} of {size} bytes"))
            return ""
        try:
            return self._read(end - start, data + start).decode()
        except UnicodeDecodeError as error:
            self._report(self._damaged(row, f"not UTF-8 text (byte {error.start})"))
            return ""

    def _read_place(self, size: int, position: int) -> bytes:
        """Read bytes that contain positions of texts. For an object, keep the block for its other texts."""
        return self._read(size, position) if self._remote is None else read_in_blocks(self._remote, position, size)

    def _read(self, size: int, position: int) -> bytes:
        if self._remote is not None:
            return self._remote.read(position, size)
        try:
            content = os.pread(self._descriptor, size, position)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        if len(content) < size:
            raise self._unusable(f"it ends before byte {position + size:,}")
        return content

    def _unusable(self, why: str) -> DataError:
        if self._prepared:
            return DataError(f"{self._path}: prepared corpus is missing or damaged ({why})", hint=PREPARE_AGAIN)
        return DataError(f"{self._path}: can't be read ({why})", hint=_CHANGED_HINT)

    def _damaged(self, row: int, why: str) -> DataError:
        if self._prepared:
            return self._unusable(f"document {row}: {why}")
        return DataError(f"{self._path}:{row + 1}: {why}", hint=_DAMAGED_HINT)


def most_open() -> int:
    """Return how many files a source may keep open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, limit // _OPEN_SHARE))


_MAGIC = b"ARROW1"
#: The file's end: the footer's length and the magic.
_TAIL = struct.Struct("<i6s")
_CONTINUATION = b"\xff\xff\xff\xff"
#: Positions of fields in the tables of the format.
_MESSAGE_BODY_LENGTH, _FOOTER_BATCHES = 3, (2, 3)
#: ``Block`` of the footer: offset, length of the header, padding, length of the body.
_BLOCK = struct.Struct("<qi4xq")
#: Bytes to read at each end, and for a header of a stream. A header needs about 300 bytes, plus 100 per column.
_END_BYTES, _WINDOW_BYTES = 64 << 10, 4 << 10
#: A longer header or footer counts as damage.
_MOST_BYTES = 64 << 20


def fill_headers(path: Path) -> None:
    """Fill the headers of an Arrow file or stream, and the blocks that its fingerprint covers.

    Filling a damaged file stops at the damage. Then indexing refuses it, or it is fetched and converted, which reports
    the damage. A file takes one request per batch, many in parallel; a stream's batches are requested one by one.
    Raises a DataError if the object can't be read.
    """
    remote = remote_of(path)
    assert remote is not None
    with path.open("r+b") as file:
        get = partial(_get, remote, file.fileno())
        head = get((0, min(_END_BYTES, remote.size)))
        with suppress(struct.error, ValueError):
            if head.startswith(_MAGIC):
                ranges = _blocks(remote.size, _footer(remote.size, get))
                for _ in spread_requests(get, ranges):
                    pass
            else:
                _walk(remote.size, head, get)
        for position in sampled_positions(remote.size):
            get((position, min(SAMPLED_BYTES, remote.size - position)))
    set_time(path, remote)


def _get(remote: RemoteObject, descriptor: int, extent: tuple[int, int]) -> bytes:
    """Read (start, size) of the object; write it to the stand-in's file."""
    start, size = extent
    if not 0 <= size <= _MOST_BYTES or not 0 <= start <= remote.size - size:
        raise ValueError("a damaged length")
    content = remote.read(start, size)
    os.pwrite(descriptor, content, start)
    return content


def _footer(size: int, get: partial[bytes]) -> bytes:
    end = get((max(0, size - _END_BYTES), min(_END_BYTES, size)))
    length, magic = _TAIL.unpack(end[-_TAIL.size :])
    if magic != _MAGIC or length <= 0:
        raise ValueError("no footer")
    if length + _TAIL.size > len(end):
        end = get((size - _TAIL.size - length, length + _TAIL.size))
    return end[-_TAIL.size - length : -_TAIL.size]


def _blocks(size: int, footer: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the headers of all dictionaries and batches."""
    for field in _FOOTER_BATCHES:
        place = _field(footer, field)
        if not place:
            continue
        first = place + _unsigned(footer, place)
        for number in range(_unsigned(footer, first)):
            start, length, _ = _BLOCK.unpack_from(footer, first + 4 + number * _BLOCK.size)
            yield start, min(length, size - start)


def _walk(size: int, window: bytes, get: partial[bytes]) -> None:
    """Fill the headers of a stream in order, because each one states where the next is."""
    position = begin = 0
    while position < size:
        if position + 8 > begin + len(window):
            window, begin = get((position, min(_WINDOW_BYTES, size - position))), position
        prefix = 8 if window[position - begin :].startswith(_CONTINUATION) else 4
        (length,) = struct.unpack_from("<i", window, position - begin + prefix - 4)
        if length <= 0:  # the end of the stream
            return
        if position + prefix + length > begin + len(window):
            window, begin = get((position, prefix + length)), position
        place = position - begin + prefix
        message = window[place : place + length]
        body = _field(message, _MESSAGE_BODY_LENGTH)
        (body_length,) = struct.unpack_from("<q", message, body) if body else (0,)
        if body_length < 0:
            raise ValueError("a damaged length")
        position += prefix + length + body_length


def _field(table: bytes, number: int) -> int:
    """Return the position of a field of the FlatBuffer's root table; 0 if it has its default."""
    root = _unsigned(table, 0)
    fields = root - struct.unpack_from("<i", table, root)[0]
    entry = 4 + 2 * number
    if fields < 0 or entry >= struct.unpack_from("<H", table, fields)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", table, fields + entry)
    return root + offset if offset else 0


def _unsigned(table: bytes, position: int) -> int:
    return int(struct.unpack_from("<I", table, position)[0])
