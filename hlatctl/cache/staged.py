"""An environment on a node's own disk, unpacked from the archive of ``hlatctl.cache.environment``.

``FOLDER/<hash>`` holds one environment and is kept for the next attempt. While a job runs, it holds a shared lock on
that folder; environments that no job has used for a week are removed. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from hlatctl.cache.trust import make_private, require_own
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.locks import lock_folder, locked_file, remove_unlocked

_KEEP_S = 7 * 86400.0
_BLOCK_BYTES = 1 << 20
_COMPLETE = "complete.json"


@dataclass(frozen=True, kw_only=True)
class Staged:
    """An environment on this node.

    Args:
        folder: that holds it.
        lock: descriptor; processes that inherit it keep the folder.
    """

    folder: Path
    lock: int

    @property
    def prefix(self) -> Path:
        """The environment's ``sys.prefix``."""
        return self.folder / "env"

    @property
    def python(self) -> str:
        """Its program."""
        return os.fspath(self.prefix / "bin" / "python")


def stage(record: dict[str, Any], folder: Path) -> Staged:
    """Return an environment on this node's disk, unpacked if it is not there yet.

    Args:
        record: of the archive, as ``hlatctl.cache.environment.pack`` returns it.
        folder: for environments, on this node's own disk; created for this user alone.

    Raises:
        StorageError: another user can change the archive or the folder, or the archive is damaged.
        OSError: the archive can't be read, or the disk is full.
    """
    archive, target = Path(record["archive"]), folder / str(record["archive_sha256"])[:32]
    make_private(folder)
    with locked_file(folder / ".lock"):  # of several jobs on this node, one unpacks
        if not _is_whole(target):
            shutil.rmtree(target, ignore_errors=True)
            require_own(archive.parent)
            require_own(archive)
            _unpack(record, archive, target)
        os.utime(target / _COMPLETE)
        lock = lock_folder(target, shared=True)
        if lock is None:
            raise StorageError(f"{target}: can't be locked", hint="set cluster.worker_cache_dir to a local disk")
        _remove_old(folder)
    return Staged(folder=target, lock=lock)


def _unpack(record: dict[str, Any], archive: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        if _extract(archive, partial) != record["archive_sha256"]:
            raise StorageError(f"{archive}: is not as it was written", hint=f"`rm {archive}`; it is made again")
        _move_python(partial, target, record)
        files.write_json(partial / _COMPLETE, {"v": 1, **_measure(partial)})
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(archive: Path, folder: Path) -> str:
    """Extract an archive and return its SHA-256; empty if it can't be read as one."""
    with archive.open("rb") as file:
        hashed = _Hashed(file)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], hashed), mode="r|gz", bufsize=_BLOCK_BYTES) as tar:
                tar.extraction_filter = staticmethod(lambda member, _: member)  # as written
                tar.extractall(folder, _inside(tar))
        except (tarfile.TarError, EOFError, zlib.error):
            return ""
        while hashed.read(_BLOCK_BYTES):
            pass
    return hashed.digest.hexdigest()


def _inside(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members. The hash is known only after the last, so a name outside of the folder is refused before."""
    for member in tar:
        name = Path(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise tarfile.ReadError(f"{member.name}: is outside of the archive's folder")
        yield member


def _move_python(partial: Path, target: Path, record: dict[str, Any]) -> None:
    """Change what names the environment's old place: pyvenv.cfg, the link to Python, first lines of scripts."""
    env = partial / "env"
    if record["own_base"]:
        base = next((partial / "base" / "bin").glob("python3.*"))
        for link in (path for path in (env / "bin").glob("python*") if path.is_symlink()):
            link.unlink()
        for name in ("python", "python3", base.name):
            (env / "bin" / name).symlink_to(f"../../base/bin/{base.name}")
        (env / "pyvenv.cfg").write_text(
            f"home = {target / 'base' / 'bin'}\ninclude-system-site-packages = false\n", encoding="utf-8"
        )
    old, new = (f"#!{prefix}/bin/".encode() for prefix in (record["prefix"], target / "env"))
    for script in (env / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and (text := script.read_bytes()).startswith(old):
            script.write_bytes(new + text.removeprefix(old))


def _is_whole(target: Path) -> bool:
    """Return whether an environment is complete: programs that clean /tmp remove single old files."""
    try:
        known = files.read_json(target / _COMPLETE)
        return all(known[key] == value for key, value in _measure(target).items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _measure(target: Path) -> dict[str, int]:
    """Return the number and the bytes of an environment's files, without those that Python adds when it runs."""
    count = size_bytes = 0
    for root, folders, names in os.walk(target):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if name != _COMPLETE or root != os.fspath(target):
                count += 1
                size_bytes += os.lstat(os.path.join(root, name)).st_size
    return {"files": count, "bytes": size_bytes}


def _remove_old(folder: Path) -> None:
    oldest = time.time() - _KEEP_S
    for complete in folder.glob(f"*/{_COMPLETE}"):
        if complete.stat().st_mtime < oldest:
            remove_unlocked(complete.parent)


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        return block
