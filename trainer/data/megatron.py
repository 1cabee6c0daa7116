r"""Megatron's indexed datasets: ``PREFIX.bin`` holds token ids, ``PREFIX.idx`` says where each document lies.

Version 1 of the ``.idx`` file, little-endian (NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``)::

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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hlatctl.run.atomic import fsync
from hlatctl.run.errors import DataError
from hlatctl.run.reading import open_regular
from trainer.data.remote import RemoteObject
from trainer.data.stand_in import remote_of

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
_HINT = "copy both files again"

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
    """Return the header of a pair of files; their sizes are checked.

    Raises:
        DataError: a file is missing, damaged, or of an unknown kind.
    """
    index, data = index_path(prefix), data_path(prefix)
    try:
        with open(index, "rb", opener=open_regular) as file:
            content, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
        data_bytes = data.stat().st_size
    except OSError as error:
        raise DataError(f"{error.filename}: not readable ({error.strerror})", hint=_HINT) from None
    if content.startswith(_OLD_MAGIC):
        raise DataError(
            f"{index}: is of Megatron's old unmapped format", hint="write the dataset with --dataset-impl mmap"
        )
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise DataError(f"{index}: not an index of Megatron's", hint=_HINT)
    _, version, code, sequences, entries = _HEADER.unpack(content)
    if version != _VERSION:
        raise DataError(f"{index}: version {version} is unknown", hint=f"version {_VERSION} is read")
    if code not in _DTYPES:
        raise DataError(f"{index}: type {code} is not a type of token ids", hint="known are 1 to 5 and 8")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if size != expected or not entries:
        modes = ", as with the modes of multimodal data, which are not read" if size == expected + sequences else ""
        raise DataError(f"{index}: has {size} bytes, not {expected}{modes}", hint=_HINT)
    dtype = np.dtype(_DTYPES[code])
    if data_bytes % dtype.itemsize:
        raise DataError(f"{data}: {data_bytes} bytes are not a whole number of {dtype.name} ids", hint=_HINT)
    return Header(dtype, sequences, entries - 1)


class TokenFile:
    """The documents of one pair of files, by position.

    Raises:
        DataError: a file is missing, damaged, or of an unknown kind.
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
        """Return a document's ids as they lie in the file; those of several sequences are joined.

        Raises:
            DataError: the index points outside of the files.
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
        return DataError(f"{self._path}: document {document + 1} lies outside of the file", hint=_HINT)


class RemoteIds:
    """The ids of a ``.bin`` file in object storage; a slice is one request.

    Args:
        remote: the file.
        dtype: of the ids.
    """

    def __init__(self, remote: RemoteObject, dtype: np.dtype[Any]) -> None:
        self._remote, self._dtype, self.itemsize = remote, dtype, dtype.itemsize

    def __len__(self) -> int:
        return self._remote.size // self.itemsize

    def __getitem__(self, part: slice) -> Ids:
        """Return the ids of a slice without a step.

        Raises:
            DataError: the object can't be read.
        """
        start, stop, _ = part.indices(len(self))
        content = self._remote.read(start * self.itemsize, max(0, stop - start) * self.itemsize)
        return np.frombuffer(content, self._dtype)


class Writer:
    """Writes a pair of files; each document is one sequence.

    Args:
        prefix: of the files.
        dtype: of the ids, from :func:`dtype_for`.
    """

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
