"""This process's Python environment as one archive, which nodes unpack on their own disks.

A process that imports PyTorch looks up 14,000 paths and opens 1,150 files on shared storage; an archive is one file per
node. A virtual environment contains its own path and Python's, so both are rewritten after unpacking. The archive holds
``env``, which is ``sys.prefix`` with this project's packages, and ``base``, the Python below a virtual environment,
unless that belongs to the system.

``FOLDER/<hash>`` holds one environment and stays for the next attempt. A running job holds a shared lock on that
folder. Environments that no job has used for a week are removed. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import hlatctl
from hlatctl.cache.trust import make_private, require_own
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, StorageError, cannot_write
from hlatctl.run.files import DAMAGED, lock_folder, locked_file, new_file, remove_unlocked

PACKAGES = ("conf", "eval", "flows", "hlatctl", "trainer")
_COMPILED = "__pycache__"
#: Folders of Python's library that no job imports.
_UNUSED = ("site-packages", "test", "idlelib", "ensurepip")
_SYSTEM = Path("/usr")
#: Archives that no job has used for this time are removed.
_KEEP_S = 30 * 86400.0
#: Higher compression levels take several times as long and save a tenth.
_GZIP_LEVEL = 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where an environment is.

    Args:
        base: prefix of the Python that created it; the same as ``prefix`` in a Conda environment.
        project: the folder of this project's packages.
        library: folder of packages below the prefix, such as ``lib/python3.11/site-packages``.
    """

    prefix: Path = field(default_factory=lambda: Path(sys.prefix))
    base: Path = field(default_factory=lambda: Path(sys.base_prefix))
    project: Path = field(default_factory=lambda: Path(hlatctl.__file__).parent.parent)
    library: Path = field(default_factory=lambda: Path(os.path.relpath(sysconfig.get_path("purelib"), sys.prefix)))

    @property
    def has_own_base(self) -> bool:
        """Whether its Python is part of the archive; every node already has the system's."""
        return self.prefix != self.base and not self.base.is_relative_to(_SYSTEM)

    def check(self) -> None:
        """Check that the environment can be copied.

        Raises:
            ConfigError: it is the system's Python, or packages are elsewhere.
        """
        if self.prefix.is_relative_to(_SYSTEM):
            raise ConfigError(
                f"cluster.stage_environment=true: hlatctl runs in the system's Python ({self.prefix})",
                hint="install it into a virtual environment (`make setup`), or set cluster.stage_environment=false",
            )
        for path in sorted((self.prefix / self.library).glob("*.pth")):
            if not _is_our_link(path) and (elsewhere := _elsewhere(path, self.prefix)):
                raise ConfigError(
                    f"cluster.stage_environment=true: {path} adds packages outside of the environment ({elsewhere})",
                    hint="install that package without `-e`, or set cluster.stage_environment=false",
                )

    def members(self) -> Iterator[tuple[str, Path]]:
        """Return the files and links of the archive: name and path, in a fixed order."""
        for path in _below(self.prefix):
            if not _is_our_link(path):
                yield f"env/{path.relative_to(self.prefix)}", path
        if not self.project.is_relative_to(self.prefix):
            for package in PACKAGES:
                for path in _below(self.project / package):
                    yield f"env/{self.library}/{path.relative_to(self.project)}", path
        if self.has_own_base:
            for path in self._base():
                yield f"base/{path.relative_to(self.base)}", path

    def signs(self) -> Iterator[Path]:
        """Return paths; at least one changes when a package is installed or removed, or this project is edited."""
        library = self.prefix / self.library
        bases = (self.base / "bin", self.base / "lib", *self.base.glob("lib/python*")) if self.has_own_base else ()
        for folder in (self.prefix, self.prefix / "bin", self.prefix / "lib", self.prefix / "conda-meta", *bases):
            yield from _entries(folder)
        yield from _entries(library)
        yield from sorted(library.glob("*.dist-info/RECORD"))
        for package in PACKAGES:
            yield from _below(self.project / package)

    def _base(self) -> Iterator[Path]:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        yield self.base / "bin" / version
        yield from sorted(path for path in (self.base / "lib").glob("*.so*") if path.is_file())
        for path in sorted((self.base / "lib" / version).iterdir()):
            if path.name not in _UNUSED:
                yield from _below(path) if path.is_dir() else (path,)


class Packer:
    """Packs the environment for each job of a driver, and scans all of its files only if they may have changed.

    Installing, upgrading and removing a package changes an entry of a folder that this lists, and this project's files
    are checked one by one: 3,000 look-ups instead of 90,000. Manual edits of an installed package are noticed by the
    next driver.

    Args:
        layout: the environment to pack; None: this process's.
    """

    def __init__(self, layout: Layout | None = None) -> None:
        self._layout = layout or Layout()
        self._signs, self._record = "", dict[str, Any]()

    def pack(self, folder: Path) -> dict[str, Any]:
        """Return the record of the environment's archive in a folder; see :func:`pack`."""
        signs = _fingerprint([(os.fspath(path), path) for path in self._layout.signs()])  # before the search
        archive = Path(self._record.get("archive", ""))
        if signs != self._signs or archive.parent != folder or not archive.is_file():
            self._record = pack(folder, self._layout)
            self._signs = signs
        else:
            os.utime(archive)
        return self._record


def pack(folder: Path, layout: Layout) -> dict[str, Any]:
    """Return the record of the environment's archive, which is created if no archive has this content.

    Args:
        folder: private folder on storage that all nodes share.

    Raises:
        ConfigError: :meth:`Layout.check` refuses it.
        StorageError: the folder is not safe, or can't be written.
    """
    layout.check()
    make_private(folder)
    members = list(layout.members())
    fingerprint = _fingerprint(members)
    archive, record = folder / f"{fingerprint}.tar.gz", folder / f"{fingerprint}.json"
    with locked_file(folder / ".lock"):
        try:
            known = files.read_sealed_json(record) if archive.is_file() else None
        except (OSError, *DAMAGED):
            known = None
        try:
            if known is None:
                known = _write(archive, members, layout)
                files.write_sealed_json(record, known, private=True)
            os.utime(archive)
            _remove_old(folder)
        except OSError as error:
            raise cannot_write(archive, error, hint="free space, or set cluster.stage_environment=false") from None
    return known


def _write(archive: Path, members: list[tuple[str, Path]], layout: Layout) -> dict[str, Any]:
    with new_file(archive) as temporary:
        with tarfile.open(temporary, "w:gz", compresslevel=_GZIP_LEVEL, format=tarfile.PAX_FORMAT) as tar:
            for name, path in members:
                tar.add(path, name, recursive=False)
        temporary.chmod(0o600)
        digest = files.sha256_file(temporary)
    return {
        "v": 1,
        "archive": os.fspath(archive),
        "archive_sha256": digest,
        "prefix": os.fspath(layout.prefix),
        "own_base": layout.has_own_base,
    }


def _fingerprint(members: list[tuple[str, Path]]) -> str:
    """Return a text that changes with any file: names, sizes and times, because reading 2 GiB at each attempt is slow.

    Compiled files don't count: Python adds them when it first imports a module, possibly only after a restart.
    """
    digest = hashlib.sha256()
    for name, path in members:
        if _COMPILED in path.parts:
            continue
        status = path.lstat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *(name for name in folders if os.path.islink(os.path.join(root, name)))]):
            yield Path(root, name)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_our_link(path: Path) -> bool:
    return path.name.startswith("__editable__") and "hlatctl" in path.name


def _elsewhere(path: Path, prefix: Path) -> str:
    """Return the folder outside the environment that a .pth file adds to Python's path; empty if none."""
    if path.name.startswith("__editable__"):
        return path.name
    lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    folders = (line for line in lines if line.startswith("/"))
    return next((line for line in folders if not Path(line).is_relative_to(prefix)), "")


def _remove_old(folder: Path) -> None:
    oldest = time.time() - _KEEP_S
    for archive in folder.glob("*.tar.gz"):
        if archive.stat().st_mtime < oldest:
            archive.with_name(f"{archive.name.removesuffix('.tar.gz')}.json").unlink(missing_ok=True)
            archive.unlink(missing_ok=True)


_STAGED_KEEP_S = 7 * 86400.0
_BLOCK_BYTES = 1 << 20
_COMPLETE = "complete.json"


@dataclass(frozen=True, kw_only=True)
class Staged:
    """An environment on this node.

    Args:
        lock: descriptor; the folder stays while a process that inherited it lives.
    """

    folder: Path
    lock: int

    @property
    def prefix(self) -> Path:
        """The environment's ``sys.prefix``."""
        return self.folder / "env"

    @property
    def python(self) -> str:
        """The environment's Python program."""
        return os.fspath(self.prefix / "bin" / "python")


def stage(record: dict[str, Any], folder: Path) -> Staged:
    """Return an environment on this node's disk, unpacked if it is not there yet.

    Args:
        record: the record that :func:`pack` returned.
        folder: parent of the environments on this node's disk; created for this user only.

    Raises:
        StorageError: another user can change the archive or the folder, or the archive is damaged.
        OSError: the archive can't be read, or the disk is full.
    """
    archive, target = Path(record["archive"]), folder / str(record["archive_sha256"])[:32]
    make_private(folder)
    with locked_file(folder / ".lock"):  # only one of several jobs on this node unpacks
        if not _is_whole(target):
            shutil.rmtree(target, ignore_errors=True)
            require_own(archive.parent)
            require_own(archive)
            _unpack(record, archive, target)
        os.utime(target / _COMPLETE)
        lock = lock_folder(target, shared=True)
        if lock is None:
            raise StorageError(f"{target}: can't be locked", hint="set cluster.worker_cache_dir to a local disk")
        _staged_remove_old(folder)
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
    with archive.open("rb") as file:
        hashed = files.Hashed(file)
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
    """Yield the members, and refuse a name outside the folder: the hash is known only after the last member."""
    for member in tar:
        name = Path(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise tarfile.ReadError(f"{member.name}: is outside of the archive's folder")
        yield member


def _move_python(partial: Path, target: Path, record: dict[str, Any]) -> None:
    """Replace the environment's old path in pyvenv.cfg, in the link to Python, and in the first lines of scripts."""
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
    """Return whether an environment is complete: programs that clean /tmp remove old files one by one."""
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


def _staged_remove_old(folder: Path) -> None:
    oldest = time.time() - _STAGED_KEEP_S
    for complete in folder.glob(f"*/{_COMPLETE}"):
        if complete.stat().st_mtime < oldest:
            remove_unlocked(complete.parent)
