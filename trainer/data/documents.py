"""Prepared Arrow files as one list of documents, mapped into memory: documents are read on access.

For each open file the first positions of its batches are kept: about 2 KB per GiB of text. Nothing else grows with the
corpus.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.reading import reading

if TYPE_CHECKING:
    from trainer.data.tokenized import TokenSource

#: Schema of a prepared file: the text; its input file, by position in ``inputs``; its 1-based row there.
SCHEMA = pa.schema([("text", pa.large_string()), ("file", pa.int32()), ("row", pa.int64())])
_HINT = "remove its folder under .cache/data and run again"
#: Files mapped at once; each takes a file descriptor.
_OPEN_FILES = 128


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a document comes from: the file's path, and its 1-based row there."""

    file: str
    row: int


class Documents(Sequence[str]):
    """The documents of prepared files, by position.

    Args:
        entries: the files of ``dataset.json``, with ``path`` and number of ``documents``.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self._paths = [Path(entry["path"]) for entry in entries]
        self._counts = [int(entry["documents"]) for entry in entries]
        self._starts = np.cumsum([0, *self._counts]).tolist()
        self._open: OrderedDict[int, _File] = OrderedDict()
        for path in self._paths:
            if not path.is_file():
                raise DataError(f"{path}: prepared corpus is missing or damaged (no such file)", hint=_HINT)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, position: int) -> str: ...

    @overload
    def __getitem__(self, position: slice) -> list[str]: ...

    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        return str(self._value(position, 0))

    def __iter__(self) -> Iterator[str]:
        return (self[position] for position in range(len(self)))

    def file_and_row(self, position: int) -> tuple[int, int]:
        """Return a document's input file, by its position in the source's inputs, and its 1-based row there."""
        return int(self._value(position, 1)), int(self._value(position, 2))

    def _value(self, position: int, column: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(position)
        number = bisect_right(self._starts, position) - 1
        return self._file(number).value(position - self._starts[number], column)

    def _file(self, number: int) -> _File:
        """Return a mapped file; the most recently used ones stay mapped."""
        if number not in self._open:
            self._open[number] = _File(self._paths[number], self._counts[number])
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]


class _File:
    """One prepared file, mapped."""

    def __init__(self, path: Path, documents: int) -> None:
        self._path = path
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            sizes = [self._reader.get_batch(i).num_rows for i in range(self._reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: prepared corpus is missing or damaged ({error})", hint=_HINT) from None
        self._starts = np.cumsum([0, *sizes])
        if self._starts[-1] != documents:
            raise DataError(
                f"{path}: prepared corpus is missing or damaged ({self._starts[-1]} documents, not {documents})",
                hint=_HINT,
            )

    def value(self, position: int, column: int) -> Any:
        """Return one cell."""
        batch = int(np.searchsorted(self._starts, position, side="right")) - 1
        try:
            return self._reader.get_batch(batch).column(column)[position - int(self._starts[batch])].as_py()
        except (UnicodeDecodeError, pa.ArrowException) as error:  # it was complete when it was written
            raise DataError(
                f"{self._path}: prepared corpus is missing or damaged (document {position}: {error})", hint=_HINT
            ) from None


class Source:
    """One corpus of a mixture: its training documents and their origins.

    Args:
        dataset: ``dataset.json``.
        index: of the source in it.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, dataset: dict[str, Any], index: int) -> None:
        self._entry = dataset["sources"][index]
        self.name = str(self._entry["path"])
        self.fingerprint = str(self._entry["fingerprint"])
        self.text_bytes = int(self._entry["text_bytes"])
        self.documents = Documents([entry for entry in dataset["files"] if entry["source"] == index])
        self._inputs: list[str] | None = None

    def origin(self, position: int) -> Origin:
        """Return the input file and row of a document."""
        if self._inputs is None:
            with reading(Path(self._entry["inputs"]), hint=_HINT):
                self._inputs = list(files.read_json(Path(self._entry["inputs"])))
        number, row = self.documents.file_and_row(position)
        return Origin(file=self._inputs[number], row=row)


def sources_of(dataset: dict[str, Any]) -> list[Source | TokenSource]:
    """Return every source of a dataset, in order.

    Raises:
        DataError: a file is missing or damaged, or a source has no training documents.
    """
    from trainer.data.tokenized import TokenSource  # which imports this module

    sources: list[Source | TokenSource] = [
        TokenSource(dataset, index) if "shards" in entry else Source(dataset, index)
        for index, entry in enumerate(dataset["sources"])
    ]
    empty = next((source for source in sources if not len(source.documents)), None)
    if empty or not sources:
        name = empty.name if empty else "data"
        raise DataError(f"{name}: the prepared corpus has no training documents", hint="use a larger corpus")
    return sources
