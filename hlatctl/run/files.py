"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 20


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def fsync_dir(path: Path) -> None:
    """Make a folder's entries (a rename, a new file) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_tree(root: Path) -> list[dict[str, Any]]:
    """Every file below a folder, sorted: ``[{"path", "bytes", "sha256"}]``."""
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return [
        {"path": p.relative_to(root).as_posix(), "bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files
    ]


def first_difference(root: Path, files: list[dict[str, Any]], *, checksums: bool = True) -> str | None:
    """The first listed file that is missing or differs, as ``"name: reason"``; None if the folder holds them all."""
    for entry in files:
        path = root / entry["path"]
        if not path.is_file():
            return f"{entry['path']}: missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{entry['path']}: {path.stat().st_size} bytes, expected {entry['bytes']}"
        if checksums and sha256_file(path) != entry["sha256"]:
            return f"{entry['path']}: checksum differs"
    return None
