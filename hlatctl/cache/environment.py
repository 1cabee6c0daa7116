"""The Python environment of this process as one archive, which nodes unpack on their own disks.

A process that imports PyTorch looks up 14,000 paths and opens 1,150 files on shared storage; an archive is one file per
node. A virtual environment names its own place and Python's: ``hlatctl.cache.staged`` repairs both on the node. The
archive holds ``env``, which is ``sys.prefix`` with this project's packages, and ``base``, the Python below a virtual
environment, unless that belongs to the system. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hlatctl
from hlatctl.cache.trust import make_private
from hlatctl.run import files
from hlatctl.run.atomic import new_file
from hlatctl.run.errors import ConfigError, cannot_write
from hlatctl.run.locks import locked_file
from hlatctl.run.reading import DAMAGED

PACKAGES = ("conf", "eval", "flows", "hlatctl", "trainer")
_COMPILED = "__pycache__"
#: Folders of Python's library that no job imports.
_UNUSED = ("site-packages", "test", "idlelib", "ensurepip")
_SYSTEM = Path("/usr")
#: Archives that no job has used for this time are removed.
_KEEP_S = 30 * 86400.0
#: Higher levels take several times as long and save a tenth.
_GZIP_LEVEL = 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where an environment lies.

    Args:
        prefix: its folder.
        base: of the Python that it was created with; the same in a Conda environment.
        project: the folder of this project's packages.
        library: folder of packages below the prefix, such as ``lib/python3.11/site-packages``.
    """

    prefix: Path = field(default_factory=lambda: Path(sys.prefix))
    base: Path = field(default_factory=lambda: Path(sys.base_prefix))
    project: Path = field(default_factory=lambda: Path(hlatctl.__file__).parent.parent)
    library: Path = field(default_factory=lambda: Path(os.path.relpath(sysconfig.get_path("purelib"), sys.prefix)))

    @property
    def has_own_base(self) -> bool:
        """Whether its Python is a part of the archive: every node has the system's own."""
        return self.prefix != self.base and not self.base.is_relative_to(_SYSTEM)

    def check(self) -> None:
        """Check that the environment can be copied.

        Raises:
            ConfigError: it is the system's Python, or packages lie elsewhere.
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
        """Return paths of which one changes when a package is installed or removed, or this project is edited."""
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
    """Packs the environment for each job of a driver, and searches all of its files only if they may have changed.

    Installing, upgrading and removing a package changes an entry of a folder that this lists, and this project's own
    files are looked at one by one: 3,000 look-ups instead of 90,000. An installed package that is edited by hand is not
    noticed until the next driver.

    Args:
        layout: of the environment; None: this process's.
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
    """Return the record of the environment's archive, which is made if there is none of this content.

    Args:
        folder: private, on storage that all nodes share.
        layout: of the environment.

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
    """Return what changes with any file: names, sizes and times, because reading 2 GiB at each attempt takes long.

    Python adds compiled files when it first imports a module, such as one that only a restart needs. They don't count.
    """
    digest = hashlib.sha256()
    for name, path in members:
        if _COMPILED in path.parts:
            continue
        status = path.lstat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _below(folder: Path) -> Iterator[Path]:
    """Return the files and links below a folder in a fixed order. Links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *(name for name in folders if os.path.islink(os.path.join(root, name)))]):
            yield Path(root, name)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_our_link(path: Path) -> bool:
    """Return whether a file is pip's link from an environment to this project's sources, which are copied instead."""
    return path.name.startswith("__editable__") and "hlatctl" in path.name


def _elsewhere(path: Path, prefix: Path) -> str:
    """Return the folder outside of the environment that a .pth file adds to Python's path; empty: none."""
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
