"""The documents of a source by position, read on access from files that stay where they are.

Held-out documents are skipped: a search in a sorted array maps a position among the training documents to a document.
Only the index grows with the corpus, and it is mapped into memory (``trainer.data.table``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.reading import reading
from trainer.data.damage import Report, fail
from trainer.data.index import Rows
from trainer.data.read_ahead import in_order
from trainer.data.stand_in import remote_of, shown
from trainer.data.table import Table, load_table, scanned_table
from trainer.data.text_file import PREPARED_COLUMN, OpenFiles, TextFile

if TYPE_CHECKING:
    from trainer.data.tokenized import TokenSource

#: Schema of a prepared file: the text; its input, by position in ``inputs``; its 1-based row there.
SCHEMA = pa.schema([(PREPARED_COLUMN, pa.large_string()), ("file", pa.int32()), ("row", pa.int64())])
#: A corpus can have millions of files, whose paths take 100 bytes each.
_MAX_INPUTS_BYTES = 1 << 30
_HINT = "remove its folder under .cache/data and run again"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a document comes from: the file's path, and its 1-based row there."""

    file: str
    row: int


class Documents(Sequence[str]):
    """The training documents of a table, by position; one without text is empty or blank.

    Args:
        table: of the source.
        path_of: the path of a file's number.
        report: is called with a damaged document; if it returns, the document has no text.
    """

    def __init__(self, table: Table, path_of: Callable[[int], str], report: Report = fail) -> None:
        self.table, self._path_of, self._report = table, path_of, report
        self._files = OpenFiles(self._open)

    @classmethod
    def prepared(cls, entries: Sequence[Mapping[str, Any]]) -> Documents:
        """Return the documents of prepared files that have no index.

        Args:
            entries: the files of ``dataset.json``, with ``path`` and number of ``documents``.
        """
        return cls(scanned_table(entries), lambda number: str(entries[number]["path"]))

    def __len__(self) -> int:
        return self.table.starts[-1] - len(self.table.skips)

    @overload
    def __getitem__(self, position: int) -> str: ...

    @overload
    def __getitem__(self, position: slice) -> list[str]: ...

    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.text_of(self.table.document(position))

    def __iter__(self) -> Iterator[str]:
        return in_order(self, range(len(self)))

    @property
    def is_remote(self) -> bool:
        """Whether files are in object storage. Prepared files never are, and are numbered last."""
        first = self.table.files["input"][:1]
        return bool(len(first)) and first[0] >= 0 and remote_of(self._path_of(0)) is not None

    def text_of(self, document: int) -> str:
        """Return a document's text, counted with held-out ones.

        Raises:
            DataError: its file is missing or has changed; or, by default, it is damaged.
        """
        number, row = self.table.find(document)
        return self._files.get(number).text(row)

    def input_and_row(self, position: int) -> tuple[int, int]:
        """Return a document's input, by its position in the source's inputs, and its 1-based row there."""
        number, row = self.table.find(self.table.document(position))
        at = int(self.table.files["input"][number])
        if at >= 0:
            return at, row + 1
        batch = self._files.get(number).batch(row)
        with pa.memory_map(self._path_of(number)) as source, pa.ipc.open_file(source) as reader:
            cells = reader.get_batch(int(batch["number"])).slice(row - int(batch["row"]), 1)
            return cells.column("file")[0].as_py(), cells.column("row")[0].as_py()

    def _open(self, number: int) -> TextFile:
        file = self.table.files[number]
        return TextFile(
            self._path_of(number),
            self.table.batches_of(number),
            size=int(file["size"]),
            mtime_ns=int(file["mtime_ns"]),
            documents=self.table.starts[number + 1] - self.table.starts[number],
            report=self._report,
        )


class _Picked(Sequence[str]):
    """The texts of some documents."""

    def __init__(self, documents: Documents, picked: Rows) -> None:
        self._documents, self._picked = documents, picked

    def __len__(self) -> int:
        return len(self._picked)

    @property
    def is_remote(self) -> bool:
        """Whether reading needs requests."""
        return self._documents.is_remote

    def __getitem__(self, position: Any) -> Any:
        return self._documents.text_of(int(self._picked[position]))


class Source:
    """One corpus of a mixture: its training documents and their origins.

    Args:
        dataset: ``dataset.json``.
        index: of the source in it.

    Raises:
        DataError: a file of the index is missing or damaged.
    """

    def __init__(self, dataset: dict[str, Any], index: int) -> None:
        self._entry = dataset["sources"][index]
        self.name = str(self._entry["path"])
        self.fingerprint = str(self._entry["fingerprint"])
        self.text_bytes = int(self._entry["text_bytes"])
        self._prepared = [entry for entry in dataset["files"] if entry["source"] == index]
        self._inputs: list[Any] | None = None
        if "index" in self._entry:
            report = _skip if dataset["on_corrupt"] == "skip" else fail
            table = load_table(self._entry["index"])
            prepared = int((table.files["input"] < 0).sum())
            if prepared != len(self._prepared):
                raise DataError(
                    f"{self.name}: dataset.json names {len(self._prepared)} prepared files, its index {prepared}",
                    hint=_HINT,
                )
            self.documents = Documents(table, self._path_of, report)
        else:
            self.documents = Documents.prepared(self._prepared)

    def held_out_texts(self) -> _Picked:
        """Return the texts that are held out, of files that are used where they lie."""
        return _Picked(self.documents, self.documents.table.held_out)

    def origin(self, position: int) -> Origin:
        """Return the input file and row of a document."""
        number, row = self.documents.input_and_row(position)
        path, before = self._input(number)
        return Origin(file=shown(path), row=row + before)

    def excerpt(self, position: int, characters: int) -> str:
        """Return the beginning of a document's text."""
        return self.documents[position][:characters]

    def _path_of(self, number: int) -> str:
        at = int(self.documents.table.files["input"][number])
        return self._input(at)[0] if at >= 0 else str(self._prepared[-1 - at]["path"])

    def _input(self, number: int) -> tuple[str, int]:
        """Return the path of an input, and the rows before it: a large file is several inputs."""
        if self._inputs is None:
            with reading(Path(self._entry["inputs"]), hint=_HINT):
                self._inputs = list(files.read_json(Path(self._entry["inputs"]), _MAX_INPUTS_BYTES))
        given = self._inputs[number]
        path, before = (given, 0) if isinstance(given, str) else (given["path"], given["rows_before"])
        return os.path.join(os.path.dirname(self._entry["inputs"]), path), before


def _skip(error: DataError) -> None:
    """Skip a damaged document (``data.on_corrupt=skip``)."""


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
