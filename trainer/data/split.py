"""Split the documents of a unit of work into training files and a held-out file, and write them."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from hlatctl.run import files
from trainer.data.documents import SCHEMA

COLUMN = SCHEMA.names[0]
_BATCH_BYTES = 4 << 20
_FILE_BYTES = 1 << 30


def held_out_name(unit: int) -> str:
    """Return the name of the file of a unit's held-out documents."""
    return f"held-out-{unit:05d}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and its origin: source, the input by its position in the source's inputs, its 1-based row there."""

    text: str
    source: int
    file: int
    row: int


class Split:
    """Sends each document of a unit to the training files or to the held-out file, and counts.

    A hash of (unit, position in the unit) decides. In unit 0, the first document is for training, and if none is held
    out, the last one is: so neither side of a corpus is empty.

    Args:
        folder: to write to.
        validation_fraction: share of the documents held out.
        unit: number of the unit.
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
        """Add a document."""
        size = len(document.text.encode())
        self._batch.append(document)
        self._batch_bytes += size
        self.bytes += size
        self.documents += 1
        if self._batch_bytes >= _BATCH_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Finish the file durably; return its entry in ``dataset.json``."""
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
