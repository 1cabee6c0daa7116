"""A cache as one file: a tar archive of its complete modules and their manifest, the same bytes for the same cache."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from hlatctl.cache import manifest
from hlatctl.cache.layout import MANIFEST
from hlatctl.cache.manifest import Entry
from hlatctl.cache.store import Folder
from hlatctl.cache.transfer import sha256_of
from hlatctl.cache.verify import verify
from hlatctl.run.errors import StorageError, cannot_write


def export(folder: Path, to: Path) -> int:
    """Write a folder's modules into an archive, whole or not at all; how many.

    Raises:
        StorageError: a module is not what the manifest says, nothing is complete, or the archive can't be written.
    """
    store = Folder(folder)
    found = verify(store)
    # An interrupted or failed compilation has nothing to give; a module that has changed would hide damage.
    unfinished = {module.name for module in found.modules if module.problem}
    if changed := [reason for name, reason in found.broken.items() if name not in unfinished]:
        raise StorageError(
            f"{folder}: {len(changed)} modules are broken: {changed[0]}",
            hint=f"`hlatctl cache verify {folder} --quarantine` moves them aside",
        )
    whole = [module for module in found.modules if module.name not in unfinished]
    if not whole:
        raise StorageError(f"{folder}: holds no complete module")
    entries = _entries(folder, [file.path for module in whole for file in module.files])
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w") as archive:
            _add(archive, MANIFEST, io.BytesIO(manifest.text(entries, boot="").encode()))
            for entry in entries:
                with (folder / entry["path"]).open("rb") as file:
                    _add(archive, entry["path"], file)
        temporary.replace(to)
    except OSError as error:
        raise cannot_write(to, error) from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(whole)


def _entries(folder: Path, paths: list[str]) -> list[Entry]:
    """What the manifest says, which has just been compared; without one, what the files hold."""
    known, store = manifest.read(Folder(folder)) or {}, Folder(folder)
    return [
        {
            "path": path,
            "bytes": (folder / path).stat().st_size,
            "sha256": known[path]["sha256"] if path in known else sha256_of(store, path),
        }
        for path in sorted(paths)
    ]


def _add(archive: tarfile.TarFile, name: str, file: io.BufferedIOBase) -> None:
    """One member without owner and time, which say nothing of a graph."""
    member = tarfile.TarInfo(name)
    member.size = file.seek(0, os.SEEK_END)
    file.seek(0)
    archive.addfile(member, file)
