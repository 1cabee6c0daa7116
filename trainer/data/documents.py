r"""The documents of a source, text or token ids, by position; files stay where they are and are read on access.

Text: held-out documents are skipped. A search in a sorted array maps a position among the training documents to a
document. Only the index grows with the corpus, and it is mapped into memory (``trainer.data.arrow_index``).

Token ids: such a corpus is a folder that ``hlatctl data tokenize`` wrote (``trainer.data.tokenize``: pairs in
Megatron's format and ``token_ids.json``), a folder of Megatron's files, or the prefix of one pair. Nothing is copied.
``trainer.data.prepare_tokens`` makes the prepared folder.

Megatron's indexed datasets: ``PREFIX.bin`` holds token ids, ``PREFIX.idx`` states where each document lies. Version 1
of the ``.idx`` file, little-endian (NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``)::

    9 bytes "MMIDIDX\0\0", uint64 version, uint8 type of the ids, uint64 S sequences, uint64 D = documents + 1
    int32[S]  length of each sequence, in tokens
    int64[S]  its position in the .bin file, in bytes
    int64[D]  the first sequence of each document; the last one is S

A document is one sequence or several, such as its sentences. Both files are mapped into memory, so opening them reads
only the header, and memory does not grow with their size. A ``.bin`` file in object storage is read by ranges.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.files import fsync, open_regular, reading
from trainer.data import formats
from trainer.data.arrow_index import PREPARED_COLUMN, Rows, Table, TextFile, load_table, most_open
from trainer.data.formats import Report, fail
from trainer.data.packing import Deal, Permutation
from trainer.data.remote import PREPARE_AGAIN, RemoteObject, in_order, remote_of, shown
from trainer.data.tokenizer import Tokens, tokenizer_of

#: Schema of a prepared file: the text; its input, by position in ``inputs``; its 1-based row there.
SCHEMA = pa.schema([(PREPARED_COLUMN, pa.large_string()), ("file", pa.int32()), ("row", pa.int64())])
#: A corpus can have millions of files, whose paths take 100 bytes each.
_MAX_INPUTS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a document: the file's path, and its 1-based row there."""

    file: str
    row: int


class Documents(Sequence[str]):
    """The training documents of a table, by position; one without text is empty or blank.

    Args:
        table: the source's table.
        path_of: returns a file's path by its number.
        report: called with a damaged document; if it returns, the document has no text.
    """

    def __init__(self, table: Table, path_of: Callable[[int], str], report: Report = fail) -> None:
        self.table, self._path_of, self._report = table, path_of, report
        self._file = lru_cache(maxsize=most_open())(self._open)

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
        """Whether files are in object storage. Prepared files never are, and they have the last numbers."""
        first = self.table.files["input"][:1]
        return bool(len(first)) and first[0] >= 0 and remote_of(self._path_of(0)) is not None

    def text_of(self, document: int) -> str:
        """Return a document's text; held-out documents count in its number.

        Raises:
            DataError: its file is missing or has changed; or, by default, it is damaged.
        """
        number, row = self.table.find(document)
        return self._file(number).text(row)

    def input_and_row(self, position: int) -> tuple[int, int]:
        """Return a document's input, by its position in the source's inputs, and its 1-based row there."""
        number, row = self.table.find(self.table.document(position))
        at = int(self.table.files["input"][number])
        if at >= 0:
            return at, row + 1
        batch = self._file(number).batch(row)
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
            report=self._report,
        )


class _Picked(Sequence[str]):
    def __init__(self, documents: Documents, picked: Rows) -> None:
        self._documents, self._picked = documents, picked

    def __len__(self) -> int:
        return len(self._picked)

    @property
    def is_remote(self) -> bool:
        return self._documents.is_remote

    def __getitem__(self, position: Any) -> Any:
        return self._documents.text_of(int(self._picked[position]))


class Source:
    """One corpus of a mixture, by its index in ``dataset.json``: its training documents and their origins.

    Raises a DataError if a file of the index is missing or damaged.
    """

    def __init__(self, dataset: dict[str, Any], index: int) -> None:
        self._entry = dataset["sources"][index]
        self.name = str(self._entry["path"])
        self.fingerprint = str(self._entry["fingerprint"])
        self.text_bytes = int(self._entry["text_bytes"])
        self._prepared = [entry for entry in dataset["files"] if entry["source"] == index]
        self._inputs: list[Any] | None = None
        report = _skip if dataset["on_corrupt"] == "skip" else fail
        table = load_table(self._entry["index"])
        prepared = int((table.files["input"] < 0).sum())
        if prepared != len(self._prepared):
            raise DataError(
                f"{self.name}: dataset.json names {len(self._prepared)} prepared files, its index {prepared}",
                hint=PREPARE_AGAIN,
            )
        self.documents = Documents(table, self._path_of, report)

    @property
    def mean_tokens(self) -> float:
        """Estimate of the mean tokens of a document."""
        return float(self._entry["estimated_tokens"]) / len(self.documents)

    def held_out_texts(self) -> _Picked:
        """Return the held-out texts of files that are used where they lie."""
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
        """Return the path of an input, and the number of rows before it: a large file is several inputs."""
        if self._inputs is None:
            with reading(Path(self._entry["inputs"]), hint=PREPARE_AGAIN):
                self._inputs = list(files.read_json(Path(self._entry["inputs"]), _MAX_INPUTS_BYTES))
        given = self._inputs[number]
        path, before = (given, 0) if isinstance(given, str) else (given["path"], given["rows_before"])
        return os.path.join(os.path.dirname(self._entry["inputs"]), path), before


def _skip(error: DataError) -> None:
    """Skip a damaged document (``data.on_corrupt=skip``)."""


def sources_of(dataset: dict[str, Any]) -> list[Source | TokenSource]:
    """Return every source of a dataset, in order.

    Raises a DataError if a file is missing or damaged, or a source has no training documents.
    """
    sources: list[Source | TokenSource] = [
        TokenSource(dataset, index) if "shards" in entry else Source(dataset, index)
        for index, entry in enumerate(dataset["sources"])
    ]
    empty = next((source for source in sources if not len(source.documents)), None)
    if empty or not sources:
        name = empty.name if empty else "data"
        raise DataError(f"{name}: the prepared corpus has no training documents", hint="use a larger corpus")
    return sources


def deal_of(config: Config, sources: Sequence[Source | TokenSource]) -> Deal:
    """Return the deal of the documents of a configuration's sources."""
    return Deal(
        [len(source.documents) for source in sources],
        keys=[source.fingerprint for source in sources],
        weights=config.data.source_weights,
        lengths=[source.mean_tokens for source in sources],
        rows=config.data_rows,
        seed=config.seed,
    )


MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_VERSION = 1
#: Types of ids by their code in the header. 6 and 7 are floating-point types, which can't be ids.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
#: Megatron writes uint16 below this vocabulary size.
_UINT16_VOCABULARY = 65_500
_MEGATRON_HINT = "copy both files again"

Ids = npt.NDArray[np.integer[Any]]


def index_path(prefix: Path) -> Path:
    """Return the ``.idx`` file of a prefix."""
    return prefix.with_name(f"{prefix.name}.idx")


def data_path(prefix: Path) -> Path:
    """Return the ``.bin`` file of a prefix."""
    return prefix.with_name(f"{prefix.name}.bin")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron writes ids of a vocabulary in."""
    return np.dtype("<u2" if vocab_size < _UINT16_VOCABULARY else "<i4")


def is_index(path: Path) -> bool:
    """Return whether a file begins like an ``.idx`` file of Megatron, of any version."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(MAGIC)).startswith((MAGIC, _OLD_MAGIC))
    except OSError:
        return False


@dataclass(frozen=True)
class Header:
    """The type of the ids, and the numbers of sequences and documents."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int


def read_header(prefix: Path) -> Header:
    """Return the header of a pair of files, after checking their sizes.

    Raises a DataError if a file is missing, damaged, or of an unknown kind.
    """
    index, data = index_path(prefix), data_path(prefix)
    try:
        with open(index, "rb", opener=open_regular) as file:
            content, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
        data_bytes = data.stat().st_size
    except OSError as error:
        raise DataError(f"{error.filename}: not readable ({error.strerror})", hint=_MEGATRON_HINT) from None
    if content.startswith(_OLD_MAGIC):
        raise DataError(
            f"{index}: is of Megatron's old unmapped format", hint="write the dataset with --dataset-impl mmap"
        )
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise DataError(f"{index}: not an index of Megatron's", hint=_MEGATRON_HINT)
    _, version, code, sequences, entries = _HEADER.unpack(content)
    if version != _VERSION:
        raise DataError(f"{index}: version {version} is unknown", hint=f"version {_VERSION} is read")
    if code not in _DTYPES:
        raise DataError(f"{index}: type {code} is not a type of token ids", hint="known are 1 to 5 and 8")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if size != expected or not entries:
        modes = ", as with the modes of multimodal data, which are not read" if size == expected + sequences else ""
        raise DataError(f"{index}: has {size} bytes, not {expected}{modes}", hint=_MEGATRON_HINT)
    dtype = np.dtype(_DTYPES[code])
    if data_bytes % dtype.itemsize:
        raise DataError(f"{data}: {data_bytes} bytes are not a whole number of {dtype.name} ids", hint=_MEGATRON_HINT)
    return Header(dtype, sequences, entries - 1)


class TokenFile:
    """The documents of one pair of files, by position.

    Raises a DataError if a file is missing, damaged, or of an unknown kind.
    """

    def __init__(self, prefix: Path) -> None:
        header = read_header(prefix)
        self._path = data_path(prefix)
        index, at = _mapped(index_path(prefix)), _HEADER.size
        self._lengths = np.frombuffer(index, "<i4", header.sequences, at)
        self._positions = np.frombuffer(index, "<i8", header.sequences, at + self._lengths.nbytes)
        at += self._lengths.nbytes + self._positions.nbytes
        self._firsts = np.frombuffer(index, "<i8", header.documents + 1, at)
        remote = remote_of(self._path)
        self._ids: Any = RemoteIds(remote, header.dtype) if remote else np.frombuffer(_mapped(self._path), header.dtype)
        self.tokens = len(self._ids)
        """Number of tokens of all documents."""

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, document: int) -> Ids:
        """Return a document's ids as stored in the file; several sequences are joined.

        Raises a DataError if the index points outside of the files.
        """
        if not 0 <= document < len(self):
            raise IndexError(document)
        first, last = int(self._firsts[document]), int(self._firsts[document + 1])
        if not 0 <= first <= last <= len(self._lengths):
            raise self._damaged(document)
        if last == first + 1:
            return self._sequence(first, document)
        parts = [self._sequence(number, document) for number in range(first, last)]
        ids: Ids = np.concatenate(parts) if parts else self._ids[:0]
        return ids

    def _sequence(self, number: int, document: int) -> Ids:
        length, position = int(self._lengths[number]), int(self._positions[number])
        begin, rest = divmod(position, self._ids.itemsize)
        if length < 0 or begin < 0 or rest or begin + length > len(self._ids):
            raise self._damaged(document)
        ids: Ids = self._ids[begin : begin + length]
        return ids

    def _damaged(self, document: int) -> DataError:
        return DataError(f"{self._path}: document {document + 1} lies outside of the file", hint=_MEGATRON_HINT)


class RemoteIds:
    """The ids of a ``.bin`` file in object storage; a slice is one request."""

    def __init__(self, remote: RemoteObject, dtype: np.dtype[Any]) -> None:
        self._remote, self._dtype, self.itemsize = remote, dtype, dtype.itemsize

    def __len__(self) -> int:
        return self._remote.size // self.itemsize

    def __getitem__(self, part: slice) -> Ids:
        """Return the ids of a slice without a step. Raises a DataError if the object can't be read."""
        start, stop, _ = part.indices(len(self))
        content = self._remote.read(start * self.itemsize, max(0, stop - start) * self.itemsize)
        return np.frombuffer(content, self._dtype)


class Writer:
    """Writes a pair of files, given by their path without suffix; each document is one sequence."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix, self._dtype = prefix, dtype
        self._file = data_path(prefix).open("wb", buffering=1 << 20)
        self._lengths: list[int] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, ids: Ids) -> None:
        """Add a document."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self._lengths.append(len(ids))

    def finish(self) -> None:
        """Write the index, and make both files durable."""
        self._file.close()
        lengths = np.array(self._lengths, dtype="<i4")
        positions = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], out=positions[1:], dtype="<i8")
        header = _HEADER.pack(MAGIC, _VERSION, _CODES[self._dtype], len(lengths), len(lengths) + 1)
        with index_path(self._prefix).open("wb") as file:
            file.write(header + lengths.tobytes() + (positions * self._dtype.itemsize).tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        fsync(data_path(self._prefix))
        fsync(index_path(self._prefix))


def _mapped(path: Path) -> mmap.mmap | bytes:
    """Map a file into memory; it stays mapped as long as an array uses it."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""  # an empty file can't be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


MANIFEST = "token_ids.json"
#: Pairs of files mapped simultaneously; each takes two file descriptors.
_OPEN_FILES = 128
_SUFFIXES = (".idx", ".bin")


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """A corpus of token ids.

    Args:
        name: its path in the configuration.
        prefixes: prefixes of its pairs of files, in order.
        folder: folder with tokenizer and held-out text; None for Megatron's files.
        manifest: content of ``token_ids.json``; empty for Megatron's files.
    """

    name: str
    prefixes: list[Path]
    folder: Path | None
    manifest: dict[str, Any]


def find(path: Path) -> TokenCorpus | None:
    """Return the corpus of token ids at a folder, a prefix, or one file of a pair; None if there is something else.

    Raises a DataError if a pair is incomplete, ``token_ids.json`` is damaged, or there is text next to the ids.
    """
    if not path.is_dir():
        prefix = path.with_suffix("") if path.suffix in _SUFFIXES else path
        if not is_index(index_path(prefix)):
            return None
        _check_pairs([prefix])
        return TokenCorpus(name=shown(path), prefixes=[prefix], folder=None, manifest={})
    if (path / MANIFEST).is_file():
        return _own(path)
    prefixes = [file.with_suffix("") for file in sorted(path.rglob("*.idx")) if _is_index(file, path)]
    if not prefixes:
        return None
    _check_pairs(prefixes)
    for folder in {prefix.parent for prefix in prefixes}:
        _refuse_text(path, prefixes[0], folder)
    return TokenCorpus(name=shown(path), prefixes=prefixes, folder=None, manifest={})


def _own(folder: Path) -> TokenCorpus:
    path = folder / MANIFEST
    with reading(path, hint="copy the folder again, or run `hlatctl data tokenize` again"):
        manifest = files.read_sealed_json(path)
        prefixes = [folder / Path(shard["name"]).name for shard in manifest["shards"]]
    return TokenCorpus(name=shown(folder), prefixes=prefixes, folder=folder, manifest=manifest)


def _is_index(file: Path, root: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    return not hidden and is_index(file)


def _check_pairs(prefixes: Sequence[Path]) -> None:
    for prefix in prefixes:
        if not data_path(prefix).is_file():
            raise DataError(
                f"{data_path(prefix)}: is missing beside {prefix.name}.idx", hint="copy both files of the pair"
            )


def _refuse_text(root: Path, prefix: Path, folder: Path) -> None:
    """Refuse a file with columns next to token ids: it is text that somebody meant to train on.

    Plain text and .json are often descriptions, such as Megatron's own.
    """
    known = ((path, formats.format_of(path)) for path in sorted(folder.iterdir()) if path.suffix != ".json")
    text = next((path for path, kind in known if kind and kind.has_columns), None)
    if text is not None:
        raise DataError(
            f"data.path={root}: contains token ids ({prefix.name}.idx) and text ({text.name})",
            hint="move one of them to another folder",
        )


class TokenDocuments(Sequence[Tokens]):
    """The training documents of a corpus of ids, by position, with their end-of-sequence tokens.

    Args:
        entries: its pairs of files: ``path`` (the prefix), and the numbers of ``documents`` and ``tokens``.
        held_out: sorted positions, among all documents, of those to skip.
        vocab_size: larger ids are refused.
        eos_id: added to documents that don't end with it; a document without tokens stays empty.
    """

    def __init__(
        self, entries: Sequence[dict[str, Any]], *, held_out: Sequence[int], vocab_size: int, eos_id: int
    ) -> None:
        self._entries = entries
        self._starts = np.cumsum([0, *(int(entry["documents"]) for entry in entries)]).tolist()
        self._held_out = np.array(held_out, dtype=np.int64)
        #: For the i-th held-out document, the number of training documents before it.
        self._before = self._held_out - np.arange(len(self._held_out))
        self._vocab_size, self._eos_id = vocab_size, eos_id
        self._file = lru_cache(maxsize=_OPEN_FILES)(self._open)

    def __len__(self) -> int:
        return int(self._starts[-1]) - len(self._held_out)

    @overload
    def __getitem__(self, position: int) -> Tokens: ...

    @overload
    def __getitem__(self, position: slice) -> list[Tokens]: ...

    def __getitem__(self, position: int | slice) -> Tokens | list[Tokens]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.ids_of(self.among_all(position))

    def __iter__(self) -> Iterator[Tokens]:
        return in_order(self, range(len(self)))

    @property
    def is_remote(self) -> bool:
        """Whether the ids are in object storage."""
        return bool(self._entries) and remote_of(data_path(Path(self._entries[0]["path"]))) is not None

    def among_all(self, position: int) -> int:
        """Return the position among all documents of a training document."""
        return position + int(np.searchsorted(self._before, position, side="right"))

    def file_and_row(self, document: int) -> tuple[Path, int]:
        """Return the ``.bin`` file of a document, by its position among all, and its 1-based number there."""
        number = bisect_right(self._starts, document) - 1
        return data_path(Path(self._entries[number]["path"])), document - self._starts[number] + 1

    def stored(self, document: int) -> Ids:
        """Return the stored ids of a document by its position among all.

        Raises a DataError if a file is missing, damaged, or not the one that was prepared.
        """
        number = bisect_right(self._starts, document) - 1
        return self._file(number)[document - self._starts[number]]

    def ids_of(self, document: int) -> Tokens:
        """Return the ids of a document by its position among all, with the end-of-sequence token.

        Raises:
            DataError: an id is not in the vocabulary; or as :meth:`stored`.
        """
        ids = self.stored(document)
        if len(ids) and (int(ids.max()) >= self._vocab_size or int(ids.min()) < 0):
            self._refuse(document, ids)
        whole = not len(ids) or ids[-1] == self._eos_id
        return ids.astype(np.int32) if whole else np.append(ids, self._eos_id).astype(np.int32)

    def _refuse(self, document: int, ids: Ids) -> None:
        wrong = int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
        path, row = self.file_and_row(document)
        raise DataError(
            f"{path}: token {wrong + 1} of document {row} is {ids[wrong]}, and the tokenizer has ids below "
            f"{self._vocab_size}",
            hint="set tokenizer.path to the tokenizer that made these ids, or copy the files again",
        )

    def _open(self, number: int) -> TokenFile:
        entry = self._entries[number]
        file = TokenFile(Path(entry["path"]))
        check_counts(entry, documents=len(file), tokens=file.tokens)
        return file


class HeldOut:
    """The held-out documents of a corpus of ids."""

    def __init__(self, documents: TokenDocuments, numbers: Sequence[int]) -> None:
        self._documents, self._numbers = documents, numbers
        self.is_remote = documents.is_remote

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> Tokens:
        return self._documents.ids_of(self._numbers[position])


def describe_pair(prefix: Path) -> dict[str, Any]:
    """Return the entry of a pair of files for :class:`TokenDocuments`: prefix, documents, tokens.

    Raises a DataError if a file is missing or damaged.
    """
    header = read_header(prefix)
    tokens = data_path(prefix).stat().st_size // header.dtype.itemsize
    return {"path": str(prefix.absolute()), "documents": header.documents, "tokens": tokens}


def check_counts(entry: dict[str, Any], *, documents: int, tokens: int) -> None:
    """Raise a DataError if the numbers of documents and tokens of a pair of files differ from its entry."""
    for name, found in (("documents", documents), ("tokens", tokens)):
        if found != entry[name]:
            raise DataError(
                f"{entry['path']}.bin, .idx: {found} {name}, not {entry[name]}",
                hint="restore the files that the corpus had",
            )


class TokenSource:
    """One corpus of token ids of a mixture, with the interface of :class:`Source`."""

    def __init__(self, dataset: dict[str, Any], index: int) -> None:
        entry, described = dataset["sources"][index], dataset["tokenizer"]
        self.name = str(entry["path"])
        self.fingerprint = str(entry["fingerprint"])
        self.estimated_tokens = int(entry["estimated_tokens"])
        self._held_out = held_out(self.fingerprint, entry["rows"], entry["held_out"])
        self.documents = TokenDocuments(
            entry["shards"], held_out=self._held_out, vocab_size=described["vocab_size"], eos_id=described["eos_id"]
        )
        self._decoder = tokenizer_of(dataset)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a document."""
        return self.estimated_tokens / len(self.documents)

    def origin(self, position: int) -> Origin:
        """Return the ``.bin`` file of a document and its 1-based number there."""
        path, row = self.documents.file_and_row(self.documents.among_all(position))
        return Origin(file=shown(path), row=row)

    def excerpt(self, position: int, characters: int) -> str:
        """Return the beginning of a document as text."""
        return self._text(self.documents[position][: characters + 1])[:characters]

    def held_out_texts(self) -> Iterator[str]:
        """Yield the texts of the held-out documents."""
        held_out = HeldOut(self.documents, self._held_out)
        return (self._text(ids) for ids in in_order(held_out, range(len(held_out))))

    def _text(self, ids: Tokens) -> str:
        """Return the text of ids without the last one, which is the end of sequence or not requested."""
        return str(self._decoder.decode(ids[:-1].tolist(), skip_special_tokens=False))


def held_out(fingerprint: str, documents: int, count: int) -> list[int]:
    """Return the sorted held-out positions: a pure function, so only their number is stored."""
    order = Permutation(documents, f"held out {fingerprint}")
    return sorted(order[place] for place in range(count))
