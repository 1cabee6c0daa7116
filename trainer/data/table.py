"""The index of a source on disk: its files, the batches of each, and which documents are held out.

Three arrays without headers, appended while the corpus is prepared and mapped into memory when it is read. 10,000 files
of 5 MB take 1 MB. Numbers are 64-bit and little-endian.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlatctl.run import files
from hlatctl.run.errors import DataError
from trainer.data.index import BATCH, Batches, Indexed, Rows

#: A file: its first document, 0-based in the source, with held-out ones; the number of its first batch; its ``size`` in
#: bytes and time of change (-1: not checked, for prepared files); and its position in the source's inputs, or -1 - k
#: for the k-th prepared file.
FILE = np.dtype([(name, "<i8") for name in ("first", "batch", "size", "mtime_ns", "input")])
_KINDS: dict[str, Any] = {"files": FILE, "batches": BATCH, "skips": np.dtype("<i8")}
_HINT = "remove its folder under .cache/data and run again"


@dataclass(frozen=True)
class Table:
    """The files of a source.

    Args:
        starts: the first document of each file; at the end, the number of documents.
        files: array of :data:`FILE`.
        batches: of all files; None if files have to be scanned when they are opened (version 2 of ``dataset.json``).
        skips: for each held-out document, the number of training documents before it.
    """

    starts: list[int]
    files: npt.NDArray[np.void]
    batches: Batches | None
    skips: Rows

    def document(self, position: int) -> int:
        """Return the document at a position among the training documents; O(log n)."""
        return position + int(self.skips.searchsorted(position, side="right"))

    def find(self, document: int) -> tuple[int, int]:
        """Return a document's file and its 0-based row there; O(log n)."""
        number = bisect_right(self.starts, document) - 1
        return number, document - self.starts[number]

    def batches_of(self, number: int) -> Batches | None:
        """Return the batches of a file; None if it has to be scanned."""
        if self.batches is None:
            return None
        end = self.files["batch"][number + 1] if number + 1 < len(self.files) else len(self.batches)
        return self.batches[self.files["batch"][number] : end]

    @property
    def held_out(self) -> Rows:
        """The documents that are held out."""
        return self.skips + np.arange(len(self.skips))


class TableWriter:
    """Appends files to the table of a source; nothing is kept in memory but counts.

    Args:
        folder: to write to.
        name: of the table's files, before the kind.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = {kind: folder / f"{name}-{kind}.bin" for kind in _KINDS}
        self._stack = ExitStack()
        self._out = {kind: self._stack.enter_context(path.open("wb")) for kind, path in self._paths.items()}
        self.documents = self.held_out = self.batches = 0

    def add(self, file: Indexed, number: int, held_out: Rows, *, checked: bool) -> None:
        """Append a file.

        Args:
            file: its index.
            number: its position in the source's inputs, or -1 - k.
            held_out: rows that are held out, sorted.
            checked: refuse the file if its size or time of change differ when it is opened.
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
        """Hold out the last document, if none of the table is held out."""
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
    """Map the table of a ``dataset.json`` into memory.

    Raises:
        DataError: a file is missing or damaged.
    """
    arrays = {kind: _mapped(dtype, **description[kind]) for kind, dtype in _KINDS.items()}
    starts = [*arrays["files"]["first"].tolist(), int(description["rows"])]
    return Table(starts, arrays["files"], arrays["batches"], arrays["skips"])


def scanned_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of prepared files without an index: each is scanned when it is opened.

    Args:
        entries: the files of ``dataset.json``.
    """
    starts = np.cumsum([0, *(int(entry["documents"]) for entry in entries)]).tolist()
    rows = [(start, 0, -1, -1, -1 - number) for number, start in enumerate(starts[:-1])]
    return Table(starts, np.array(rows, dtype=FILE), None, np.empty(0, dtype=np.int64))


def _mapped(dtype: Any, *, path: str, sha256: str) -> Any:
    try:
        if files.sha256_file(Path(path)) != sha256:
            raise DataError(f"{path}: the index of the corpus is damaged (its checksum differs)", hint=_HINT)
        if not Path(path).stat().st_size:
            return np.empty(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the index of the corpus is missing or damaged ({error})", hint=_HINT) from None
