"""Read and copy a store's files: each is read once and hashed while it is written. Each thread has one buffer."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from hlatctl.cache.layout import File, why_no_neff
from hlatctl.cache.manifest import Entry
from hlatctl.cache.store import Source, Store

_BUFFER_BYTES = 1 << 20
_HEAD_BYTES = 64

_local = threading.local()


class BrokenError(Exception):
    """A file of a store is missing, unreadable or different from its checksum."""


def copy_checked(source: Source, file: File, target: Path, sha256: str | None) -> Entry:
    """Copy a file and hash the bytes that are written; return its entry.

    Raises:
        BrokenError: the source can't be read or is damaged.
    """
    digest, size, buffer = hashlib.sha256(), 0, _buffer()
    with io.FileIO(target, "w") as output:
        for block in _blocks(source, file.path, buffer):
            if (
                size == 0
                and sha256 is None
                and file.path.endswith(".neff")
                and (why := why_no_neff(bytes(block[:_HEAD_BYTES]), file.bytes))
            ):
                raise BrokenError(f"{file.path}: {why}")
            digest.update(block)
            size += len(block)
            _write_all(output, block)
        mtime_ns = os.fstat(output.fileno()).st_mtime_ns
    actual = digest.hexdigest()
    if size != file.bytes:
        raise BrokenError(f"{file.path}: {size} bytes, expected {file.bytes}")
    if sha256 is not None and actual != sha256:
        raise BrokenError(f"{file.path}: checksum differs")
    return {"path": file.path, "bytes": size, "sha256": actual, "mtime_ns": mtime_ns}


def sha256_of(store: Store, path: str) -> str:
    """Return the SHA-256 of a file, as hex.

    Raises:
        BrokenError: it can't be read.
    """
    digest = hashlib.sha256()
    for block in _blocks(store, path, _buffer()):
        digest.update(block)
    return digest.hexdigest()


def head_of(store: Store, path: str) -> bytes:
    """Return a file's first 64 bytes.

    Raises:
        BrokenError: it can't be read.
    """
    return next((bytes(block[:_HEAD_BYTES]) for block in _blocks(store, path, _buffer()[:_HEAD_BYTES])), b"")


def _buffer() -> memoryview:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BUFFER_BYTES))
    buffer: memoryview = _local.buffer
    return buffer


def _blocks(store: Source, path: str, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a file's bytes, each block in the same buffer."""
    try:
        with store.open(path) as stream:
            while count := stream.readinto(buffer):
                yield buffer[:count]
    except FileNotFoundError:
        raise BrokenError(f"{path}: missing") from None
    except OSError as error:
        raise BrokenError(f"{path}: can't be read ({error.strerror or error})") from None


def _write_all(output: io.FileIO, block: memoryview) -> None:
    while block:
        block = block[output.write(block) or 0 :]
