"""Read and write a checkpoint's tensors: each process writes one shard, and reads what it needs from any shard.

A reader can have any layout, regardless of the writer's. Nothing here communicates, and there is no pickle. Each
process decides alone which of its blocks it writes, from its place among the processes, so a save needs no agreed plan.

A shard is a safetensors file with one block of each of some tensors, written and hashed in one pass. The header has the
blocks' positions in their whole tensors, as torch.distributed.checkpoint writes them
(https://github.com/huggingface/safetensors#format, torch's ``checkpoint/_hf_utils.py``), so torch can read shards too.

``tensors.jsonl`` is the index of all shards, so that no process reads all their headers. The first line is
``{"files": [...], "v": 1}``. Each other line is ``[name, dtype, shape, chunks]``, in order of names. A chunk is
``[number of its file, first byte, offset in each dimension, size in each dimension]``, flat. A reader parses only the
lines of its tensors: 70B on 2,048 processes have 370,000 chunks, 17 MB.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from hlatctl.run.checkpoint import INDEX_FILES
from hlatctl.run.errors import CheckpointError, StorageError, code_of, hint_of
from hlatctl.run.files import DAMAGED, fsync, parse_json, read_bytes, why, write_text
from trainer.parallel.tensor import UnevenShard


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a whole tensor.

    Args:
        values: the block's values, as a plain tensor. Writing to it changes the process's tensor.
        offsets: position of its first element in the whole, one per dimension.
        shape: shape of the whole tensor.
    """

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def chunks_of(tensor: Any) -> list[Chunk]:
    """Return this process's non-empty blocks."""
    if isinstance(tensor, UnevenShard):
        return [chunk for chunk, _ in _uneven(tensor)]
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return [Chunk(values=tensor.detach(), offsets=(0,) * len(shape), shape=shape)]
    values = tensor.to_local().detach()  # a DTensor; importing the class takes a second
    if not values.numel():
        return []
    (place,) = tensor.__create_chunk_list__()
    return [Chunk(values=values, offsets=tuple(place.offsets), shape=shape)]


def writers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return which of the replicas of each tensor's block writes it, by its number among them, in order of names.

    Processes that share a block share all other blocks of that kind too. So each of them assigns the blocks to
    them, largest first, each to the process with the fewest bytes, and all get the same result.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    found = {}
    for name in sorted(tensors, key=lambda name: (-_nbytes(tensors[name]), name)):
        axes, _, replicas = _replicas(tensors[name])
        load = loads.setdefault(axes, [0] * replicas)
        found[name] = load.index(min(load))
        load[found[name]] += _nbytes(tensors[name])
    return dict(sorted(found.items()))


def chunks_to_write(tensors: Mapping[str, Tensor]) -> dict[str, Chunk]:
    """Return the block of each tensor that this process writes. Processes with equal blocks share the work."""
    mine = (name for name, writer in writers(tensors).items() if writer == _replicas(tensors[name])[1])
    written = ((name, _written(tensors[name])) for name in mine)
    return {name: chunk for name, chunk in written if chunk is not None}


def _written(tensor: Tensor) -> Chunk | None:
    if isinstance(tensor, UnevenShard):
        return next((chunk for chunk, writes in _uneven(tensor) if writes), None)
    return next(iter(chunks_of(tensor)), None)


def _uneven(tensor: UnevenShard) -> list[tuple[Chunk, bool]]:
    shape = tuple(tensor.size())
    return [
        (Chunk(values=values, offsets=offsets, shape=shape), writes)
        for values, offsets, writes in tensor.chunks
        if values.numel()
    ]


def _nbytes(tensor: Tensor) -> int:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(part.numel()) * part.element_size()


def _replicas(tensor: Tensor) -> tuple[tuple[str, ...], int, int]:
    """Return the axes along which the part is replicated, its number among the replicas, and how many exist."""
    if isinstance(tensor, UnevenShard):
        return ("uneven",), *tensor.replica
    axes: list[str] = []
    replica, replicas = 0, 1
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_replicate():
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            axes.append(str(axis))
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
            replicas *= mesh.size(axis)
    return tuple(axes), replica, replicas


SUFFIX = ".safetensors"
#: Prefix of the weights among a checkpoint's tensors.
WEIGHTS = "model."
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA, _SHARDING, _OFFSETS = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
_LENGTH_BYTES, _ALIGNMENT = 8, 8
#: Safetensors' own limit.
_MAX_HEADER_BYTES = 100_000_000
_BLOCK_BYTES = 8 << 20
_NUMBERED = re.compile(r"shard-(\d{5,})-model-00001-of-00001\.safetensors")


class StoredChunk(NamedTuple):
    """A block in a file; as JSON, a list.

    Args:
        dtype: safetensors' name of the dtype.
        shape: shape of the whole tensor, as the file states it.
        begin: position of its first byte in the file.
        offsets: position of its first element in the whole.
        sizes: size of the block in each dimension.
    """

    tensor: str
    dtype: str
    shape: list[int]
    begin: int
    offsets: list[int]
    sizes: list[int]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A written shard. ``entry`` is its entry in the manifest: ``path``, ``bytes``, ``sha256``."""

    entry: dict[str, Any]
    chunks: list[StoredChunk]


def file_name(number: int) -> str:
    """Return the name of a process's shard; numbers start at 1."""
    return f"shard-{number:05d}-model-00001-of-00001{SUFFIX}"


def number_of(name: str) -> int | None:
    """Return the number in a name from :func:`file_name`; None for other files."""
    match = _NUMBERED.fullmatch(name)
    return int(match.group(1)) if match else None


def write_shard(path: Path, chunks: Mapping[str, Chunk]) -> ShardFile:
    """Write blocks by tensor name into a new file, durably, hashing the bytes on the way.

    Raises an OSError if it can't be written.
    """
    header, stored = header_of(chunks)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        values = (_bytes_of(chunks[chunk.tensor].values) for chunk in stored)
        for block in itertools.chain([memoryview(header)], values):
            for start in range(0, len(block), _BLOCK_BYTES):
                part = block[start : start + _BLOCK_BYTES]
                file.write(part)
                digest.update(part)
            size += len(block)
    fsync(path)
    return ShardFile(entry={"path": path.name, "bytes": size, "sha256": digest.hexdigest()}, chunks=stored)


def read_header(path: Path) -> list[StoredChunk]:
    """Return the blocks of a file after checking that they fill it exactly.

    Raises:
        OSError: it can't be read.
        ValueError: it is not a shard, or its blocks don't match its size.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        size = os.fstat(file.fileno()).st_size
        if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(f"its header has {length} bytes, the file {size}")
        text = file.read(length)
    try:
        header = dict(parse_json(text))
        metadata = header.pop(_METADATA, None) or {}
        offsets = parse_json(metadata[_SHARDING]) if _SHARDING in metadata else {}
        stored = [_stored(name, entry, offsets, _LENGTH_BYTES + length) for name, entry in header.items()]
    except DAMAGED as error:
        raise ValueError(f"its header is invalid ({why(error)})") from None
    end = _LENGTH_BYTES + length
    for chunk in sorted(stored, key=lambda chunk: chunk.begin):
        if chunk.begin != end:
            raise ValueError(f"{chunk.tensor} begins at byte {chunk.begin}, expected {end}")
        end += chunk.nbytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}")
    return stored


def _stored(name: str, entry: dict[str, Any], offsets: dict[str, Any], data: int) -> StoredChunk:
    sizes = [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    at = offsets[name][_OFFSETS] if offsets else [0] * len(sizes)
    shape = [first + size for first, size in zip(at, sizes, strict=True)]
    chunk = StoredChunk(name, entry["dtype"], shape, data + int(begin), list(at), sizes)
    if min([*sizes, *at], default=0) < 0 or chunk.nbytes != end - begin:
        raise ValueError(f"{name}: {end - begin} bytes, expected {chunk.nbytes}")
    return chunk


def header_of(blocks: Mapping[str, Chunk]) -> tuple[bytes, list[StoredChunk]]:
    """Return the header of a shard with these blocks, and where each one is in the file, in the file's order."""
    chunks = sorted(blocks.items(), key=lambda item: (-item[1].values.element_size(), item[0]))
    offsets = {name: {_OFFSETS: list(chunk.offsets)} for name, chunk in chunks}
    entries: dict[str, Any] = {_METADATA: {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(offsets)}}
    begin = 0
    for name, chunk in chunks:
        end = begin + chunk.values.nbytes
        entries[name] = {
            "dtype": _NAMES[chunk.values.dtype],
            "shape": list(chunk.values.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = _LENGTH_BYTES + len(text)
    stored = [
        StoredChunk(
            name,
            entries[name]["dtype"],
            list(chunk.shape),
            data + entries[name]["data_offsets"][0],
            list(chunk.offsets),
            entries[name]["shape"],
        )
        for name, chunk in chunks
    ]
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, stored


def _bytes_of(values: Tensor) -> memoryview:
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


INDEX = INDEX_FILES["native"]
_VERSION = 1
#: 2,048 processes and 500 tensors make a line of some 150 bytes each: 150 MB.
_MAX_INDEX_BYTES = 1 << 30


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Args:
        name: the name with its kind, such as ``model.norm.weight``.
        dtype: safetensors' name of the dtype.
        shape: shape of the whole tensor.
        chunks: each block, with the name of its file.
    """

    name: str
    dtype: str
    shape: list[int]
    chunks: list[tuple[str, StoredChunk]]


class ShardIndex:
    """The tensors of a checkpoint's shards, from the text of ``tensors.jsonl``; another text raises a ValueError."""

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
        """Yield the selected tensors in order of names; the others aren't parsed.

        Raises a ValueError if a line can't be read.
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

        ``sizes`` are the bytes of each file.
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


def compose(shards: Mapping[str, Sequence[StoredChunk]]) -> ShardIndex:
    """Return the index of shards, given as their blocks by file name.

    Raises a StorageError if parts of a tensor are in no shard, or in two.
    """
    names, by_tensor = sorted(shards), dict[str, list[tuple[int, StoredChunk]]]()
    for number, name in enumerate(names):
        for chunk in shards[name]:
            by_tensor.setdefault(chunk.tensor, []).append((number, chunk))
    lines = [json.dumps({"files": names, "v": _VERSION})]
    for tensor, placed in sorted(by_tensor.items()):
        shape = [max(ends) for ends in zip(*(chunk.shape for _, chunk in placed), strict=True)]
        missing = _missing(shape, [chunk for _, chunk in placed])
        if missing > 0:
            raise StorageError(f"{tensor}: {missing} of {math.prod(shape)} elements were written by no process")
        if len({tuple(chunk.offsets) for _, chunk in placed}) < len(placed):
            raise StorageError(f"{tensor}: two processes wrote the same block")
        rows = [[number, chunk.begin, *chunk.offsets, *chunk.sizes] for number, chunk in placed]
        lines.append(json.dumps([tensor, placed[0][1].dtype, shape, rows], separators=(",", ":")))
    return ShardIndex("\n".join(lines) + "\n")


def read_index(folder: Path) -> ShardIndex:
    """Return the index of a checkpoint's folder; one process reads it and sends it to the others.

    Raises a CheckpointError if it can't be read.
    """
    path = folder / INDEX
    try:
        return ShardIndex(read_bytes(path, _MAX_INDEX_BYTES).decode())
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"{path}: can't be read ({why(error)})") from None


def _missing(shape: Sequence[int], chunks: Sequence[StoredChunk]) -> int:
    """Return how many elements no block has. Blocks don't overlap, because one process writes each."""
    return math.prod(shape) - sum(math.prod(chunk.sizes) for chunk in chunks)


def _is_outside(chunk: StoredChunk) -> bool:
    places = zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
    return chunk.begin < 0 or any(at < 0 or size < 0 or at + size > whole for at, size, whole in places)


_DECODER: Any = json.JSONDecoder()


class _Read(NamedTuple):
    """The part of a stored block that a process needs: its ``rows``, of these the part ``inner``, into ``target``."""

    block: StoredChunk
    rows: slice
    inner: tuple[slice, ...]
    target: Tensor


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, *, number: int = 1) -> ShardFile | None:
    """Write this process's share of tensors by name; return None if other processes write all of them.

    Processes are numbered from 1; one process writes what several have. Raises a StorageError if it can't be written.
    """
    chunks = chunks_to_write(tensors)
    if not chunks:
        return None
    try:
        return write_shard(folder / file_name(number), chunks)
    except OSError as error:
        text = f"{folder}: {type(error).__name__}: {error}"
        raise StorageError(text, hint=hint_of(error), code=code_of(error)) from None


def save_whole(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write whole tensors as the only process, with their index; raises as :func:`save_tensors`."""
    save_groups([tensors], folder)


def save_groups(groups: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    """Write groups of whole tensors as the only process, each to its file, with their index.

    One group is in memory at a time. Raises as :func:`save_tensors`.
    """
    shards = {}
    for number, tensors in enumerate(groups, 1):
        shard = save_tensors(tensors, folder, number=number)
        shards[file_name(number)] = shard.chunks if shard else []
    write_text(folder / INDEX, compose(shards).text)


def grouped(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Return names in groups of at most this many bytes, unless a single one is larger; ``sizes`` are in bytes."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, index: ShardIndex | None = None) -> None:
    """Read into this process's shards in place, converted to their dtypes; without an index, read that first.

    Raises a CheckpointError if a tensor is missing, has another shape, or can't be read.
    """
    index = index or read_index(folder)
    reads: dict[str, list[_Read]] = {}
    with _damage_of(folder):
        found = set()
        for stored in index.tensors(tensors.__contains__):
            found.add(stored.name)
            for chunk in chunks_of(tensors[stored.name]):
                if chunk.shape != tuple(stored.shape):
                    raise ValueError(f"{stored.name} has shape {tuple(stored.shape)}, expected {chunk.shape}")
                missing = chunk.values.numel()
                for file, read in _overlaps(chunk, stored.chunks):
                    reads.setdefault(file, []).append(read)
                    missing -= read.target.numel()
                if missing > 0:
                    raise ValueError(f"{stored.name}: {missing} elements are in no shard")
        if absent := sorted(tensors.keys() - found):
            raise ValueError(f"{absent[0]} is missing, and {len(absent) - 1} more tensors")
        for file, wanted in sorted(reads.items()):
            with (folder / file).open("rb", buffering=0) as opened:
                for read in sorted(wanted, key=lambda read: read.block.begin):
                    _read(opened, read)


def describe_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by name, without values (on the meta device)."""
    with _damage_of(folder):
        return {
            stored.name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
            for stored in read_index(folder).tensors()
        }


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the selected tensors, whole, by name."""
    described = {name: tensor for name, tensor in describe_tensors(folder).items() if wanted(name)}
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    load_tensors(tensors, folder)
    return tensors


def _overlaps(chunk: Chunk, stored: list[tuple[str, StoredChunk]]) -> Iterator[tuple[str, _Read]]:
    """Yield the file of each stored block that a process's block overlaps, and the part of it to read."""
    sizes = chunk.values.shape
    for file, block in stored:
        theirs, ours = [], []
        for first, size, start, length in zip(chunk.offsets, sizes, block.offsets, block.sizes, strict=True):
            low, high = max(first, start), min(first + size, start + length)
            if low >= high:
                break
            theirs.append(slice(low - start, high - start))
            ours.append(slice(low - first, high - first))
        else:
            rows, *inner = theirs or [slice(0, 1)]
            yield file, _Read(block, rows, tuple(inner), chunk.values[tuple(ours)])


def _read(file: BinaryIO, read: _Read) -> None:
    """Read whole rows of a block, directly into the target where its memory has the same form."""
    dtype, row_shape = DTYPES[read.block.dtype], read.block.sizes[1:]
    shape = [read.rows.stop - read.rows.start, *row_shape] if read.block.sizes else []
    target = read.target
    row_bytes = read.block.nbytes // max(1, read.block.sizes[0] if read.block.sizes else 1)
    is_direct = target.dtype == dtype and target.is_contiguous() and target.is_cpu and list(target.shape) == shape
    values = target if is_direct else torch.empty(shape, dtype=dtype)
    file.seek(read.block.begin + read.rows.start * row_bytes)
    memory = values.view(-1).view(torch.uint8).numpy().data
    while memory:
        count = file.readinto(memory)  # type: ignore[attr-defined] # of a raw file
        if not count:
            raise ValueError(f"{file.name} ends within {read.block.tensor}")
        memory = memory[count:]
    if not is_direct:
        target.copy_(values[(slice(None), *read.inner)] if read.block.sizes else values)


@contextmanager
def _damage_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{os.fspath(folder)}: {error}", code=code_of(error)) from None
