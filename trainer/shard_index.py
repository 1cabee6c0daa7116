"""``tensors.jsonl``: where each tensor of a checkpoint is in its shards, so that nobody reads all their headers.

The first line is ``{"files": [...], "v": 1}``. Each other line is ``[name, dtype, shape, chunks]``, in order of names.
A chunk is ``[number of its file, first byte, offset in each dimension, size in each dimension]``, flat. A reader parses
only the lines of its tensors: 70B on 2,048 processes have 370,000 chunks, 17 MB. Checkpoints of older releases have no
such file; it is made from their headers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hlatctl.run.errors import CheckpointError, StorageError
from hlatctl.run.reading import DAMAGED, parse_json, read_bytes, why
from trainer.shard_file import SUFFIX, StoredChunk, read_header

INDEX = "tensors.jsonl"
_VERSION = 1
#: 2,048 processes and 500 tensors make a line of some 150 bytes each: 150 MB.
_MAX_INDEX_BYTES = 1 << 30


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Args:
        name: with its kind, such as ``model.norm.weight``.
        dtype: safetensors' name.
        shape: of the whole.
        chunks: the name of each block's file, and the block.
    """

    name: str
    dtype: str
    shape: list[int]
    chunks: list[tuple[str, StoredChunk]]


class ShardIndex:
    """The tensors of a checkpoint's shards.

    Args:
        text: the content of ``tensors.jsonl``.

    Raises:
        ValueError: it is not such a file.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        first, *self._lines = text.splitlines()
        head = parse_json(first)
        if head["v"] != _VERSION:
            raise ValueError(f"v={head['v']}: must be {_VERSION}")
        self.files = [str(name) for name in head["files"]]
        if any(Path(name).name != name for name in self.files):
            raise ValueError("names a file outside of the checkpoint's folder")

    def tensors(self, wanted: Callable[[str], bool] = bool) -> Iterator[StoredTensor]:
        """Yield the wanted tensors by name, in order of names; the others aren't parsed.

        Raises:
            ValueError: a line can't be read.
        """
        for line in self._lines:
            try:
                name, _ = _DECODER.raw_decode(line, 1)
                if wanted(name):
                    yield self._tensor(line)
            except DAMAGED as error:
                raise ValueError(f"a line is invalid ({why(error)})") from None

    def _tensor(self, line: str) -> StoredTensor:
        name, dtype, shape, chunks = _DECODER.decode(line)
        n, stored = len(shape), []
        for file, begin, *place in chunks:
            if file < 0 or len(place) != 2 * n:
                raise ValueError(f"{name}: a block is invalid")
            stored.append((self.files[file], StoredChunk(name, dtype, shape, begin, place[:n], place[n:])))
        return StoredTensor(name, dtype, shape, stored)

    def why_incomplete(self, sizes: Mapping[str, int]) -> str | None:
        """Return which tensor is not whole or not within its files, as ``"name: reason"``; None if all are.

        Args:
            sizes: the bytes of each file.
        """
        for tensor in self.tensors():
            chunks = [chunk for _, chunk in tensor.chunks]
            missing = _missing(tensor.shape, chunks)
            if missing > 0:
                return f"{tensor.name}: {missing} elements are in no shard"
            if any(map(_is_outside, chunks)):
                return f"{tensor.name}: a block lies outside of the tensor or of its file"
            if len({tuple(chunk.offsets) for chunk in chunks}) < len(chunks):
                return f"{tensor.name}: a block is listed twice"
            for file, chunk in tensor.chunks:
                if chunk.begin + chunk.nbytes > sizes.get(file, 0):
                    return f"{tensor.name}: ends at byte {chunk.begin + chunk.nbytes} of {file}, which is shorter"
        return None


def compose(shards: Mapping[str, Sequence[StoredChunk]], *, whole: bool) -> ShardIndex:
    """Return the index of shards by file name.

    Args:
        shards: their blocks.
        whole: check that each tensor is complete, with every block once.

    Raises:
        StorageError: parts of a tensor are in no shard, or in two.
    """
    names, by_tensor = sorted(shards), dict[str, list[tuple[int, StoredChunk]]]()
    for number, name in enumerate(names):
        for chunk in shards[name]:
            by_tensor.setdefault(chunk.tensor, []).append((number, chunk))
    lines = [json.dumps({"files": names, "v": _VERSION})]
    for tensor, placed in sorted(by_tensor.items()):
        shape = [max(ends) for ends in zip(*(chunk.shape for _, chunk in placed), strict=True)]
        missing = _missing(shape, [chunk for _, chunk in placed])
        if whole and missing > 0:
            raise StorageError(f"{tensor}: {missing} of {math.prod(shape)} elements were written by no process")
        if whole and len({tuple(chunk.offsets) for _, chunk in placed}) < len(placed):
            raise StorageError(f"{tensor}: two processes wrote the same block")
        rows = [[number, chunk.begin, *chunk.offsets, *chunk.sizes] for number, chunk in placed]
        lines.append(json.dumps([tensor, placed[0][1].dtype, shape, rows], separators=(",", ":")))
    return ShardIndex("\n".join(lines) + "\n")


def read_index(folder: Path) -> ShardIndex:
    """Return the index of a checkpoint's folder; one process reads it and sends it to the others.

    Raises:
        CheckpointError: it, or without it a shard's header, can't be read.
    """
    path = folder / INDEX
    try:
        if path.is_file():
            return ShardIndex(read_bytes(path, _MAX_INDEX_BYTES).decode())
        shards = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            shards[path.name] = read_header(path)
        return compose(shards, whole=False)
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"{path}: can't be read ({why(error)})") from None


def _missing(shape: Sequence[int], chunks: Sequence[StoredChunk]) -> int:
    """Return how many elements no block has. Blocks don't overlap: each is written by one process."""
    return math.prod(shape) - sum(math.prod(chunk.sizes) for chunk in chunks)


def _is_outside(chunk: StoredChunk) -> bool:
    places = zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
    return chunk.begin < 0 or any(at < 0 or size < 0 or at + size > whole for at, size, whole in places)


_DECODER: Any = json.JSONDecoder()
