"""A cache as one file: a tar archive of its complete modules and their manifest. Equal caches give equal bytes."""

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
from hlatctl.run.atomic import new_file
from hlatctl.run.errors import StorageError, cannot_write


def export(folder: Path, to: Path) -> int:
    """Write a folder's complete modules into an archive, atomically; return how many.

    Raises:
        StorageError: a module differs from the manifest, none is complete, or the archive can't be written.
    """
    store = Folder(folder)
    verified = verify(store)
    # Modules of interrupted or failed compilations are skipped; a changed module is damage, and an error.
    unfinished = {module.name for module in verified.modules if module.problem}
    if changed := [reason for name, reason in verified.broken.items() if name not in unfinished]:
        raise StorageError(
            f"{folder}: {len(changed)} modules are broken: {changed[0]}",
            hint=f"`hlatctl cache verify {folder} --quarantine` moves them aside",
        )
    whole = [module for module in verified.modules if module.name not in unfinished]
    if not whole:
        raise StorageError(f"{folder}: contains no complete module")
    entries = _entries(folder, [file.path for module in whole for file in module.files])
    try:
        with new_file(to) as temporary, tarfile.open(temporary, "w") as archive:
            _add(archive, MANIFEST, io.BytesIO(manifest.text(entries, boot="").encode()))
            for entry in entries:
                with (folder / entry["path"]).open("rb") as file:
                    _add(archive, entry["path"], file)
    except OSError as error:
        raise cannot_write(to, error) from None
    return len(whole)


def _entries(folder: Path, paths: list[str]) -> list[Entry]:
    """Return the manifest's entries, which were just verified; without a manifest, computed from the files."""
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
    """Add a member without owner and time, so that equal graphs give equal archives."""
    member = tarfile.TarInfo(name)
    member.size = file.seek(0, os.SEEK_END)
    file.seek(0)
    archive.addfile(member, file)
