"""Reads texts of Arrow files at known places: open a file, read one text. What a source is made of: documents.py."""

from __future__ import annotations

import os
import resource
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hlatctl.run.errors import DataError
from trainer.data.blocks import BLOCKS
from trainer.data.damage import Report, fail
from trainer.data.index import Batches, index_file
from trainer.data.stand_in import remote_of

#: Column of the text in prepared files.
PREPARED_COLUMN = "text"
_PREPARED_HINT = "remove its folder under .cache/data and run again"
_CHANGED_HINT = "restore the file; or index the changed corpus: `hlatctl resume`, which compares it with the run's"
_DAMAGED_HINT = "copy the file again, or set data.on_corrupt=skip"
#: Files that are kept open, at most, and as a share of those that the process may open.
_MOST_OPEN, _OPEN_SHARE = 1024, 4


class TextFile:
    """An open Arrow file whose batches are known.

    Args:
        path: of the file; one of a stand-in is read from its object, which refuses changes itself.
        batches: of the file; None: they are scanned now.
        size: in bytes that it must have; -1: any.
        mtime_ns: time of change that it must have; -1: any.
        documents: rows that it must have.
        report: is called with a damaged document; if it returns, the document has no text.

    Raises:
        DataError: the file is missing, or has changed since it was indexed.
    """

    def __init__(
        self, path: str, batches: Batches | None, *, size: int, mtime_ns: int, documents: int, report: Report = fail
    ) -> None:
        self._path, self._report, self._prepared = path, report, mtime_ns == -1
        self._remote = remote_of(path)
        if self._remote is not None and batches is not None:
            self._path, self.batches, self._rows = self._remote.url, batches, batches["row"]
            return
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        if not self._prepared and (status.st_size, status.st_mtime_ns) != (size, mtime_ns):
            what = f"{status.st_size:,} bytes, was {size:,}" if status.st_size != size else "its time of change"
            raise DataError(f"{path}: has changed since it was indexed ({what})", hint=_CHANGED_HINT)
        self.batches = self._scanned(documents) if batches is None else batches
        self._rows = self.batches["row"]

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
        """Read bytes that say where texts lie. Of an object, blocks of them are kept, for its other texts."""
        return self._read(size, position) if self._remote is None else BLOCKS.read(self._remote, position, size)

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

    def _scanned(self, documents: int) -> Batches:
        def refuse(error: DataError) -> None:
            raise self._unusable(error.message.removeprefix(f"{self._path}: "))

        indexed = index_file(Path(self._path), PREPARED_COLUMN, refuse)
        rows = indexed.rows if indexed else 0
        if indexed is None or rows != documents:
            raise self._unusable(f"{rows} documents, not {documents}")
        return indexed.batches

    def _unusable(self, why: str) -> DataError:
        if self._prepared:
            return DataError(f"{self._path}: prepared corpus is missing or damaged ({why})", hint=_PREPARED_HINT)
        return DataError(f"{self._path}: can't be read ({why})", hint=_CHANGED_HINT)

    def _damaged(self, row: int, why: str) -> DataError:
        if self._prepared:
            return self._unusable(f"document {row}: {why}")
        return DataError(f"{self._path}:{row + 1}: {why}", hint=_DAMAGED_HINT)


class OpenFiles:
    """Keeps the most recently used files open; threads may share it.

    Args:
        open_file: opens the file of a number.
    """

    def __init__(self, open_file: Callable[[int], TextFile]) -> None:
        self._open_file, self._lock = open_file, threading.Lock()
        self._open: OrderedDict[int, TextFile] = OrderedDict()
        self._most = most_open()

    def get(self, number: int) -> TextFile:
        """Return a file; it is closed when it is neither kept nor used any more."""
        with self._lock:
            file = self._open.get(number)
            if file is None:
                file = self._open[number] = self._open_file(number)
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(number)
            return file


def most_open() -> int:
    """Return how many files a source may keep open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, limit // _OPEN_SHARE))
