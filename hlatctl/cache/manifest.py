"""What a cache's files should hold: ``cache_manifest.json``, written last, so that a cache with one was whole.

A file of a worker's own copy also has the time of its last change there: while that and its size stay, and the machine
has not been started anew, what was once compared is not read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hlatctl.cache.layout import MANIFEST, is_passing, modules
from hlatctl.cache.store import Folder, Store
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.reading import DAMAGED, parse_json, why

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Entry = dict[str, Any]


def write_manifest(folder: Path) -> None:
    """Describe every file of a filled cache; last, so that a cache with a manifest is whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    paths = [file.path for module in modules(Folder(folder).files()) if not module.problem for file in module.files]
    write(folder, (describe(folder, path) for path in sorted(paths)))


def describe(folder: Path, path: str) -> Entry:
    """What the manifest says of a file."""
    return {"path": path, "bytes": (folder / path).stat().st_size, "sha256": files.sha256_file(folder / path)}


def write(folder: Path, entries: Iterable[Entry]) -> None:
    """Write a manifest of known entries, whole or not at all."""
    files.write_text(folder / MANIFEST, text(entries, boot=boot_id()))


def text(entries: Iterable[Entry], *, boot: str) -> str:
    """A manifest's content."""
    ordered = sorted(entries, key=lambda entry: str(entry["path"]))
    return json.dumps({"v": 1, "boot_id": boot, "files": ordered}, separators=(",", ":")) + "\n"


def read(store: Store) -> dict[str, Entry] | None:
    """Entries by path, none of locks; None if the store has no manifest.

    Raises:
        StorageError: it has one that can't be read, or that names a file outside of the cache.
    """
    value = _read(store)
    return None if value is None else _by_path(value)


def read_own(folder: Path) -> tuple[dict[str, Entry], bool]:
    """Entries of a worker's copy, none without a good manifest; and whether they were written since the last start."""
    try:
        value = _read(Folder(folder))
    except StorageError:
        value = None  # a copy that can't be trusted is compared anew
    if value is None:
        return {}, False
    return _by_path(value), bool(boot_id()) and value.get("boot_id") == boot_id()


def boot_id() -> str:
    """Of this start of the machine: after a power cut, file sizes and times promise nothing about their blocks."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _by_path(value: dict[str, Any]) -> dict[str, Entry]:
    return {entry["path"]: entry for entry in value["files"] if not is_passing(entry["path"])}


def _read(store: Store) -> dict[str, Any] | None:
    try:
        with store.open(MANIFEST) as file:
            content = file.read() or b""
    except (FileNotFoundError, KeyError):
        return None
    except OSError as error:
        raise StorageError(f"{store.name}/{MANIFEST}: can't be read ({error.strerror})") from None
    try:
        value = dict(parse_json(content))
        value["files"] = [
            {**entry, "path": str(entry["path"]), "bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for entry in value["files"]
        ]
    except DAMAGED as error:
        raise StorageError(
            f"{store.name}/{MANIFEST}: no readable manifest ({why(error)})",
            hint="remove the folder; the next run compiles it again",
        ) from None
    for path in (entry["path"] for entry in value["files"]):
        if path.startswith("/") or ".." in path.split("/"):
            raise StorageError(
                f"{store.name}/{MANIFEST}: names a file outside of its folder: {path}", hint="remove the folder"
            )
    return value
