"""Writes complete files with checksums, reads them, and sets the permissions of new files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hlatctl.run import reading
from hlatctl.run.atomic import new_file

_BLOCK_BYTES = 1 << 20
_SEAL = "sha256"
_SEAL_LINE = "# sha256 of all lines above: "


#: Mode of folders that only their own user can read.
PRIVATE = 0o700


@contextmanager
def created_with(mode: int) -> Iterator[None]:
    """Create folders with this mode, and files with it except the right to execute, regardless of the umask.

    Applies to the whole process, and to processes that it starts in the block.
    """
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def created_like(folder: Path) -> Iterator[None]:
    """Create files and folders with the permissions of a folder; see :func:`created_with`."""
    with created_with(folder.stat().st_mode & 0o777 | PRIVATE if folder.is_dir() else PRIVATE):
        yield


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file completely or not at all, durably.

    Args:
        private: only its own user can read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write JSON completely or not at all, durably."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n", private=private)


def read_json(path: Path, most: int = reading.MAX_FILE_BYTES) -> Any:
    """Read a JSON file.

    Args:
        path: of the file.
        most: limit of its size in bytes.

    Raises:
        OSError: it is missing, too large, or can't be read.
        ValueError: it is not JSON. :func:`hlatctl.run.reading.reading` raises an error that names the file.
    """
    return reading.parse_json(reading.read_bytes(path, most), any_number=True)


def write_sealed_json(path: Path, value: dict[str, Any], *, private: bool = False) -> None:
    """Write a JSON object with its own SHA-256, for :func:`read_sealed_json`."""
    write_json(path, {**value, _SEAL: sha256_json(value)}, private=private)


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read a JSON object and verify its seal if it has one.

    Raises:
        OSError, ValueError: it is missing, is not a JSON object, or is damaged.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, expected an object")
    seal = value.pop(_SEAL, None)
    if seal is not None and seal != sha256_json(value):
        raise ValueError("is not as it was written")
    return value


def seal_lines(text: str) -> str:
    """Return text with its SHA-256 in a comment (``#``) as the last line, for :func:`unseal_lines`."""
    return f"{text}{_SEAL_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def unseal_lines(text: str) -> tuple[str, bool]:
    """Return the text before its seal, and whether it has one.

    Raises:
        ValueError: it doesn't match its seal.
    """
    before, mark, seal = text.rpartition(_SEAL_LINE)
    if not mark:
        return text, False
    if seal.strip() != hashlib.sha256(before.encode()).hexdigest():
        raise ValueError("is not as it was written")
    return before, True


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, as hex. It doesn't depend on layout or order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_tree(root: Path) -> list[dict[str, Any]]:
    """Return ``[{"path", "bytes", "sha256"}]`` of all files below a folder, sorted."""
    return [describe(root, path) for path in sorted(path for path in root.rglob("*") if path.is_file())]


def describe(root: Path, path: Path) -> dict[str, Any]:
    """Return a file's entry for :func:`describe_tree`."""
    return {"path": path.relative_to(root).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def first_difference(root: Path, files: list[dict[str, Any]], *, checksums: bool = True) -> str | None:
    """Return the first listed file that is missing or differs, as ``"name: reason"``. None if all match.

    Files are hashed in parallel: SHA-256 of one stream is 1.8 GB/s, less than fast storage reads.
    """
    if not checksums or len(files) < 2:
        return next(filter(None, (_difference(root, entry, checksums=checksums) for entry in files)), None)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return next(filter(None, pool.map(lambda entry: _difference(root, entry, checksums=True), files)), None)


def _difference(root: Path, entry: dict[str, Any], *, checksums: bool) -> str | None:
    path = root / entry["path"]
    if not path.is_file():
        return f"{entry['path']}: missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{entry['path']}: {path.stat().st_size} bytes, expected {entry['bytes']}"
    if checksums and sha256_file(path) != entry["sha256"]:
        return f"{entry['path']}: checksum differs"
    return None
