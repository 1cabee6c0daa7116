"""Stores of caches behind one interface: a folder, an archive, or a URL for fsspec (``s3://bucket/folder``).

No store follows a link or a path out of its root. fsspec's packages read credentials from the environment or the
machine's role; no credential is stored here.

``modules`` groups a listing into compiled graphs and finds the incomplete ones, in each of these layouts:

Neuron (``neuronx-cc``)::   neuronxcc-<version>/MODULE_<hash>+<flags>/{model.neff, model.done, compile_flags.json, ...}
Inductor::                  <2 letters>/<kernel>.*, fxgraph/<2>/<key>/*, aotautograd/<key>/*, triton/<device>/<kernel>/*
TorchNeuron::               <key>.neff, one graph each, written under a temporary name and renamed
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import struct
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from hlatctl.cache.trust import belongs_to_us, require_own
from hlatctl.run.errors import DependencyError, StorageError, install

NEURON, INDUCTOR, TORCH_NEURON = "neuron", "inductor", "torch_neuron"
#: Written by ``hlatctl.cache.graphs``.
MANIFEST = "cache_manifest.json"
#: Written by the compiler's wrapper after all other files of a module.
DONE = "model.done"
NEFF = "model.neff"
#: A NEFF begins with a header of three little-endian 64-bit numbers: packaging version, size of the header, size of the
#: rest (as Amazon's KLR, ``NEFF.lean``, reads and writes it).
_NEFF_HEADER = struct.Struct("<3Q")
_NEFF_HEADER_BYTES = 1024


@dataclass(frozen=True)
class File:
    """A file of a cache.

    Args:
        path: path within the cache, with slashes.
        mtime_ns: modification time; 0 if unknown.
        problem: why the file can't be used, regardless of its content.
    """

    path: str
    bytes: int
    mtime_ns: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Module:
    """One compiled graph or kernel.

    Args:
        name: the common part of its files' paths.
        layout: ``neuron``, ``inductor`` or ``torch_neuron``.
        files: the file that completes the module comes last.
        problem: why it must not be used; empty if it is complete.
    """

    name: str
    layout: str
    files: tuple[File, ...] = field(repr=False)
    problem: str = ""

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(file.bytes for file in self.files)


def modules(files: Iterable[File]) -> list[Module]:
    """Return the modules of a listing, sorted by name. Locks, hidden and temporary files belong to none."""
    members: dict[tuple[str, str], list[File]] = defaultdict(list)
    for file in files:
        if not is_transient(file.path):
            members[_place(file.path)].append(file)
    return [_module(name, layout, own) for (layout, name), own in sorted(members.items(), key=lambda item: item[0])]


def is_lock(path: str) -> bool:
    """Return whether a path names a lock."""
    return path.endswith(".lock")


def is_transient(path: str) -> bool:
    """Return whether a path names a lock, a temporary file, or a file of hlatctl: hidden, or the manifest."""
    return is_lock(path) or path.endswith(".tmp") or path.startswith(".") or "/." in path or path == MANIFEST


def why_no_neff(head: bytes, size_bytes: int) -> str:
    """Return what is wrong with a compiled program; empty if nothing is, or if its header is unknown."""
    if size_bytes == 0:
        return "is empty: its compilation failed"
    if len(head) < _NEFF_HEADER.size:
        return f"has {size_bytes} bytes, less than a header"
    _, header_bytes, data_bytes = _NEFF_HEADER.unpack(head[: _NEFF_HEADER.size])
    if header_bytes == _NEFF_HEADER_BYTES and header_bytes + data_bytes != size_bytes:
        return f"has {size_bytes} bytes, its header says {header_bytes + data_bytes}"
    return ""


def _place(path: str) -> tuple[str, str]:
    parts = path.split("/")
    if len(parts) > 2 and parts[0].startswith("neuronxcc-") and parts[1].startswith("MODULE_"):
        return NEURON, "/".join(parts[:2])
    if parts[-1].endswith(".neff"):
        return TORCH_NEURON, path
    if len(parts) == 1:
        return INDUCTOR, parts[0]
    if len(parts) == 2:
        return INDUCTOR, f"{parts[0]}/{parts[1].split('.')[0]}"
    return INDUCTOR, "/".join(parts[:-1])


def _module(name: str, layout: str, members: list[File]) -> Module:
    files = tuple(sorted(members, key=lambda file: (file.path.endswith("/" + DONE), file.path)))
    problem = next((f"{file.path}: {file.problem}" for file in files if file.problem), "")
    if layout == NEURON and not problem:
        sizes = {file.path.removeprefix(f"{name}/"): file.bytes for file in files}
        if DONE not in sizes:
            problem = f"has no {DONE}: its compilation did not finish"
        elif not sizes.get(NEFF):
            problem = f"has {DONE} but no {NEFF}: its compilation failed"
    elif layout == TORCH_NEURON and not problem and not files[0].bytes:
        problem = "is empty"
    return Module(name, layout, files, problem)


_T = TypeVar("_T")
#: URLs of folders of this machine, where missing parents have to be created.
_LOCAL = ("file://", "local://")
#: How fsspec names the package that it needs.
_PACKAGE = re.compile(r"[Ii]nstall (\w+)")


def connect(url: str, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Nothing is read yet.

    Args:
        options: arguments of the file system's class.

    Raises:
        StorageError: the URL is invalid, or its server can't be reached.
        DependencyError: fsspec, or the package it needs for this kind of URL, is not installed.
    """
    try:
        import fsspec
    except ModuleNotFoundError:
        raise _missing(url, "fsspec") from None
    if url.startswith(_LOCAL):
        options = {**options, "auto_mkdir": True}
    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        raise _missing(url, str(error)) from None
    except ValueError as error:
        raise StorageError(f"{url}: {error}", hint="use a folder, or a URL such as s3://bucket/folder") from None
    except OSError as error:  # packages of some kinds of URLs connect immediately
        raise StorageError(f"{url}: can't be reached ({error})", hint="check the URL and the network") from None
    return system, str(root).rstrip("/")


class Objects:
    """A folder in object storage. Paths are relative to it.

    Methods raise whatever the service's package raises: OSError, and others. Callers catch ``Exception``.

    Args:
        url: the folder's URL; the folder need not exist.

    Raises:
        StorageError, DependencyError: as :func:`connect`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._system, self._root = connect(url)

    def at(self, path: str) -> str:
        """Return the URL of a path."""
        return f"{self.url}/{path}"

    def folders(self) -> list[str]:
        """Return the names of the folders directly below; [] if there is none."""
        self._system.invalidate_cache()
        try:
            listed = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in listed if _is_folder(entry))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of every file below a folder, by its path in the folder; {} if there is none."""
        root = self._path(folder)
        self._system.invalidate_cache()
        try:
            found = self._system.find(root, detail=True)
        except FileNotFoundError:
            return {}
        return {str(path)[len(root) + 1 :]: int(info["size"]) for path, info in found.items()}

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if there is none."""
        self._system.invalidate_cache()
        try:
            return int(self._system.info(self._path(path))["size"])
        except FileNotFoundError:
            return None

    def put(self, source: Path, path: str, moved: Callable[[], None] = lambda: None) -> None:
        """Copy a local file to a path. Object stores show it only when it is complete.

        Args:
            moved: called occasionally while bytes arrive, if the package reports progress.
        """
        from fsspec.callbacks import Callback

        class Moving(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                moved()

        self._system.put_file(os.fspath(source), self._path(path), callback=Moving())

    def write(self, content: bytes, path: str) -> None:
        """Write a small file."""
        self._system.pipe_file(self._path(path), content)

    def read(self, path: str) -> bytes:
        """Return the content of a small file."""
        content: bytes = self._system.cat_file(self._path(path))
        return content

    def open(self, path: str) -> io.RawIOBase:
        """Open a file as a stream."""
        stream: io.RawIOBase = self._system.open(self._path(path), "rb")
        return stream

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all its files, if it is there."""
        try:
            self._system.rm(self._path(path), recursive=True)
        except FileNotFoundError:
            return

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"


def within(limit_s: float, work: Callable[[], _T]) -> _T:
    """Return the result of ``work``, with a time limit: packages wait very long for a service that doesn't answer.

    Raises:
        TimeoutError: it takes longer; it continues in a thread that doesn't delay the process's exit.
    """
    result: list[_T] = []
    failure: list[Exception] = []

    def guarded() -> None:
        try:
            result.append(work())
        except Exception as error:  # raised in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=guarded, name="objects", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return result[0]


def _is_folder(entry: dict[str, Any]) -> bool:
    return entry.get("type") == "directory"


def _missing(url: str, what: str) -> DependencyError:
    named = _PACKAGE.search(what)
    other = (
        f", pip install '{named[1]}' for {url.partition('://')[0]}://"
        if named and named[1] not in ("s3fs", "gcsfs")
        else ""
    )
    hint = f"{install('s3')} for s3://, {install('gcs')} for gs://{other}"
    return DependencyError(f"{url}: needs a package that is not installed ({what})", hint=hint)


_LINK = "is a symbolic link, which may lead out of the cache"
_OUTSIDE = "lies outside the cache"


class Source(Protocol):
    """Files in some storage."""

    def open(self, path: str) -> io.RawIOBase:
        """Open a file; several threads may open and read files simultaneously."""


class Store(Source, Protocol):
    """A cache in some storage."""

    name: str
    """The path or URL, as given."""

    def files(self) -> list[File]:
        """Return all files, including hidden ones."""

    def require_trusted(self) -> None:
        """Refuse a store that another user of this machine could have written to.

        Raises:
            StorageError: another user could have written to it.
        """


def open_store(place: str) -> Store:
    """Open the store at a URL, an archive or a folder.

    Raises:
        StorageError: it doesn't exist.
        DependencyError: fsspec, or the package it needs for this kind of URL, is not installed.
    """
    if "://" in place:
        return Remote(place)
    path = Path(place).expanduser()
    if path.is_dir():
        return Folder(path)
    if path.is_file():
        return Archive(path)
    raise StorageError(f"{path}: no such folder or archive", hint="`hlatctl cache ls` lists the caches of the runs")


class Folder:
    """A folder of this machine or of a mounted file system."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, os.fspath(root)

    def files(self) -> list[File]:
        """List the files in one pass; files that disappear meanwhile are skipped.

        Raises:
            StorageError: a folder can't be read.
        """
        files: list[File] = []
        waiting = [""]
        while waiting:
            prefix = waiting.pop()
            try:
                with os.scandir(os.path.join(self.root, prefix)) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(f"{prefix}{entry.name}/")
                        else:
                            files += _described(entry, prefix + entry.name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StorageError(f"{self.root / prefix}: can't be read ({error.strerror})") from None
        return files

    def open(self, path: str) -> io.RawIOBase:
        """Open a file without a buffer: readers have their own."""
        descriptor = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NOFOLLOW)
        file = io.FileIO(descriptor, closefd=True)
        if not belongs_to_us(os.fstat(descriptor)):
            file.close()
            raise PermissionError(errno.EPERM, "it belongs to another user")
        return file

    def require_trusted(self) -> None:
        """Check the folder's owner and mode; :meth:`open` checks each file's owner."""
        require_own(self.root)


def _described(entry: os.DirEntry[str], path: str) -> Iterator[File]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    problem = _LINK if entry.is_symlink() else "" if stat.S_ISREG(status.st_mode) else "is not a regular file"
    yield File(path, status.st_size, status.st_mtime_ns, problem)


class Archive:
    """An uncompressed tar file (its members are compressed): members are read in place."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, os.fspath(path)
        try:
            with tarfile.open(path, "r:") as archive:
                self._members = {member.name: member for member in archive if not member.isdir()}
        except (tarfile.TarError, OSError) as error:
            raise StorageError(
                f"{path}: can't be read as an archive ({error})", hint="`hlatctl cache export` makes one"
            ) from None

    def files(self) -> list[File]:
        """Return the archive's members."""
        return [File(name, member.size, problem=_why_not(member)) for name, member in self._members.items()]

    def open(self, path: str) -> io.RawIOBase:
        """Open a member's part of the file."""
        member = self._members[path]
        return _Part(self.path, member.offset_data, member.size)

    def require_trusted(self) -> None:
        """Check the file's owner and mode."""
        require_own(self.path)


def _why_not(member: tarfile.TarInfo) -> str:
    parts = PurePosixPath(member.name)
    if parts.is_absolute() or ".." in parts.parts:
        return _OUTSIDE
    return "" if member.isreg() else "is not a regular file"


class _Part(io.RawIOBase):
    def __init__(self, path: Path, start: int, size_bytes: int) -> None:
        self._file = io.FileIO(path)
        self._file.seek(start)
        self._left = size_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self._left]
        count = self._file.readinto(view) or 0
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class Remote:
    """A URL that fsspec knows: ``s3://`` with the package s3fs, and others."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._system, self._root = connect(url)

    def files(self) -> list[File]:
        """Return the service's listing."""
        try:
            listing: dict[str, dict[str, Any]] = self._system.find(self._root, detail=True)
        except Exception as error:  # whatever the service's library raises
            raise StorageError(f"{self.name}: can't be listed ({type(error).__name__}: {error})") from error
        if not listing:
            raise StorageError(f"{self.name}: no such folder, or it is empty")
        start = len(self._root) + 1
        return [File(path[start:], int(info["size"])) for path, info in listing.items()]

    def open(self, path: str) -> io.RawIOBase:
        """Open a stream from the service."""
        stream: io.RawIOBase = self._system.open(f"{self._root}/{path}", "rb")
        return stream

    def require_trusted(self) -> None:
        """Accept the store: the service controls who may write, and a user who names the URL trusts it."""
