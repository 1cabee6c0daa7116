"""A shard: a safetensors file with one block of each of some tensors, written and hashed in one pass.

The blocks' positions in their whole tensors are in the header, as torch.distributed.checkpoint writes them
(https://github.com/huggingface/safetensors#format, torch's ``checkpoint/_hf_utils.py``), so torch can read shards too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hlatctl.run.atomic import fsync
from hlatctl.run.reading import DAMAGED, parse_json, why
from trainer.chunks import Chunk

SUFFIX = ".safetensors"
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
        tensor: its name.
        dtype: safetensors' name.
        shape: of the whole tensor, as far as the file knows.
        begin: position of its first byte in the file.
        offsets: of its first element in the whole.
        sizes: of the block.
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
    """A written shard.

    Args:
        entry: of the manifest: ``path``, ``bytes``, ``sha256``.
        chunks: its blocks.
    """

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

    Raises:
        OSError: it can't be written.
    """
    names = sorted(chunks, key=lambda name: (-chunks[name].values.element_size(), name))
    header, stored = _header([(name, chunks[name]) for name in names])
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for block in itertools.chain([memoryview(header)], (_bytes_of(chunks[name].values) for name in names)):
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


def _header(chunks: list[tuple[str, Chunk]]) -> tuple[bytes, list[StoredChunk]]:
    """Return the file's first bytes, and the blocks that follow them."""
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
    """Return a tensor's values, in host memory, as bytes."""
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
