"""Stores of caches behind one interface: a folder, an archive, or a URL for fsspec (``s3://bucket/folder``).

No store follows a link or a path out of its root.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from hlatctl.cache.layout import File
from hlatctl.cache.objects import connect
from hlatctl.cache.trust import belongs_to_us, require_own
from hlatctl.run.errors import StorageError

_LINK = "is a symbolic link, which may lead out of the cache"
_OUTSIDE = "lies outside the cache"


class Source(Protocol):
    """Files in some storage."""

    def open(self, path: str) -> io.RawIOBase:
        """Open a file; several threads may open and read files at once."""


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
    """A range of bytes of a file."""

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
        except Exception as error:  # whatever the service's own library raises
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
        """Accept the store: the service controls who may write, and naming the URL is trusting it."""
