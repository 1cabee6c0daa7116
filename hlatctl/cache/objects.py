"""A folder in object storage, through fsspec: ``s3://bucket/folder``, ``gs://`` and whatever else has a package.

The packages read credentials from the environment or the machine's role. No credential is stored here.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hlatctl.run.errors import DependencyError, StorageError

_T = TypeVar("_T")
#: URLs of folders of this machine, where missing parents have to be created.
_LOCAL = ("file://", "local://")
#: How fsspec names the package that it needs.
_PACKAGE = re.compile(r"[Ii]nstall (\w+)")


def connect(url: str, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Nothing is read yet.

    Args:
        url: of a folder or file.
        options: of the file system's class.

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
    except OSError as error:  # packages of some kinds of URLs connect at once
        raise StorageError(f"{url}: can't be reached ({error})", hint="check the URL and the network") from None
    return system, str(root).rstrip("/")


class Objects:
    """A folder in object storage. Paths are relative to it.

    Methods raise whatever the service's own package raises: OSError, and others. Callers catch ``Exception``.

    Args:
        url: of the folder; it need not exist.

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
        """Copy a file of this machine there. Stores of objects show it only when it is complete.

        Args:
            source: the file.
            path: where to.
            moved: called now and then while bytes arrive, where the package tells.
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
    """Return what ``work`` returns. Packages wait for a service that doesn't answer much longer than a person.

    Raises:
        TimeoutError: it takes longer; it is left to itself, in a thread that doesn't hold up the process's end.
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
    other = f", '{named[1]}' for {url.partition('://')[0]}://" if named and named[1] not in ("s3fs", "gcsfs") else ""
    hint = f"pip install 'hlatctl[s3]' for s3://, 'hlatctl[gcs]' for gs://{other}"
    return DependencyError(f"{url}: needs a package that is not installed ({what})", hint=hint)
