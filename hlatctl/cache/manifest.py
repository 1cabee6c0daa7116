"""``cache_manifest.json``: sizes and checksums of a cache's files. It is written last: a cache with one is complete.

In a worker's own copy the entries also have each file's modification time. As long as size and time are unchanged and
the machine has not been rebooted, a file that was verified is not read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hlatctl.cache.layout import MANIFEST, is_transient, modules
from hlatctl.cache.store import Folder, Store
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.reading import DAMAGED, MAX_FILE_BYTES, parse_json, why

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Entry = dict[str, Any]


def write_manifest(folder: Path) -> None:
    """Describe every file of a filled cache."""
    (folder / MANIFEST).unlink(missing_ok=True)
    paths = [file.path for module in modules(Folder(folder).files()) if not module.problem for file in module.files]
    write(folder, (describe(folder, path) for path in sorted(paths)))


def describe(folder: Path, path: str) -> Entry:
    """Return a file's entry."""
    return {"path": path, "bytes": (folder / path).stat().st_size, "sha256": files.sha256_file(folder / path)}


def write(folder: Path, entries: Iterable[Entry]) -> None:
    """Write a manifest of known entries, atomically."""
    files.write_text(folder / MANIFEST, text(entries, boot=boot_id()))


def text(entries: Iterable[Entry], *, boot: str) -> str:
    """Return a manifest's content."""
    ordered = sorted(entries, key=lambda entry: str(entry["path"]))
    return json.dumps({"v": 1, "boot_id": boot, "files": ordered}, separators=(",", ":")) + "\n"


def read(store: Store) -> dict[str, Entry] | None:
    """Return the entries by path, without locks; None if the store has no manifest.

    Raises:
        StorageError: the manifest can't be read, or names a file outside the cache.
    """
    value = _read(store)
    return None if value is None else _by_path(value)


def read_own(folder: Path) -> tuple[dict[str, Entry], bool]:
    """Return a worker's own entries (none without a valid manifest), and whether they are newer than the last boot."""
    try:
        value = _read(Folder(folder))
    except StorageError:
        value = None  # the copy is verified again
    if value is None:
        return {}, False
    return _by_path(value), bool(boot_id()) and value.get("boot_id") == boot_id()


def boot_id() -> str:
    """Return this boot's id: after a power cut, a file's size and time don't prove that its blocks were written."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _by_path(value: dict[str, Any]) -> dict[str, Entry]:
    return {entry["path"]: entry for entry in value["files"] if not is_transient(entry["path"])}


def _read(store: Store) -> dict[str, Any] | None:
    try:
        with store.open(MANIFEST) as file:
            content = file.read(MAX_FILE_BYTES + 1) or b""
    except (FileNotFoundError, KeyError):
        return None
    except OSError as error:
        raise StorageError(f"{store.name}/{MANIFEST}: can't be read ({error.strerror})") from None
    try:
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"has more than {MAX_FILE_BYTES:,} bytes")
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
                f"{store.name}/{MANIFEST}: names a file outside its folder: {path}", hint="remove the folder"
            )
    return value
