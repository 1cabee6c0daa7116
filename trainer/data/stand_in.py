"""Stand-ins: local folders of sparse files that stand for corpora in object storage.

A stand-in has the names and sizes of the listed files. Whoever reads a file's content first fills the part that it
needs: the headers of an Arrow file to index it, a whole file to convert it. So everything that is done with a folder
on a disk is done with a stand-in in the same way, and gives the same index, order and fingerprint.

The folder's name ends in ``.remote``, and it contains its listing. A prepared corpus keeps the listing, and the
``.idx`` files of token ids.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from conf.listing import Entry, Listing, is_url
from conf.schema import Config
from hlatctl.run.errors import DataError
from trainer.data.listing import kept_or_listed, list_corpus
from trainer.data.read_ahead import spread_requests
from trainer.data.remote import RemoteObject, remote_object

_SUFFIX, _LISTING = ".remote", ".listing.json"
_ROOT = re.compile(rf"/[^\s'\"]*?{re.escape(_SUFFIX)}(?=/|\b)")
_CHUNK_BYTES = 2 << 20
#: What a check of a file's schema or first line reads of each end.
_END_BYTES = 256 << 10


def is_remote(config: Config) -> bool:
    """Return whether a corpus of the configuration is in object storage."""
    return any(is_url(source.path) for source in config.data.inputs)


def stand_ins(config: Config, folder: Path, *, fresh: bool) -> Config:
    """Make a stand-in of each corpus in object storage; return the configuration with their paths.

    Args:
        config: of the run.
        folder: to make them in; those of a preparation that was killed are replaced.
        fresh: list the corpora now. Otherwise, the kept listings are used if there are any.

    Raises:
        DataError, DependencyError, StorageError: a corpus can't be listed.
    """
    listed = list_corpus if fresh else kept_or_listed

    def local(path: str, number: int) -> str:
        return os.fspath(_make(folder / f"source-{number:02d}{_SUFFIX}", listed(config.runs_dir, path)))

    data = config.data
    if data.path is not None and is_url(data.path):
        return replace(config, data=replace(data, path=local(data.path, 0)))
    sources = [
        replace(source, path=local(source.path, number)) if is_url(source.path) else source
        for number, source in enumerate(data.sources)
    ]
    return replace(config, data=replace(data, sources=sources))


def remote_of(path: Path | str) -> RemoteObject | None:
    """Return the object that a file of a stand-in stands for; None for any other file.

    Raises:
        DataError: the listing has no such file.
    """
    root = _root_of(Path(path))
    if root is None:
        return None
    listing, entries = _listed(root)
    name = Path(path).relative_to(root).as_posix()
    if name not in entries:
        raise DataError(f"{listing.folder}/{name}: is not among the files that were listed", hint="list it again")
    return remote_object(f"{listing.folder}/{name}", entries[name])


def shown(path: Path | str) -> str:
    """Return the URL that a path of a stand-in stands for; the path itself for any other."""
    root = _root_of(Path(path))
    if root is None:
        return os.fspath(path)
    name = Path(path).relative_to(root).as_posix()
    return _listed(root)[0].folder + ("" if name == "." else f"/{name}")


def in_words(message: str) -> str:
    """Return a message with the URLs of stand-ins instead of their paths."""
    return _ROOT.sub(lambda match: shown(match[0]), message)


def fetch(path: Path, start: int = 0, size: int | None = None, *, whole_lines: bool = False) -> None:
    """Fill a range of a stand-in's file from its object.

    Args:
        path: of the file.
        start: first byte.
        size: bytes; None: all that follow.
        whole_lines: also the byte before, and the rest of the last line.

    Raises:
        DataError: the object can't be read.
    """
    remote = _object(path)
    end = remote.size if size is None else min(start + size, remote.size)
    start = max(0, start - 1) if whole_lines else start
    fetch_ranges([(path, start, end - start)])
    line_ends = not whole_lines
    while not line_ends and end < remote.size:
        content = remote.read(end - 1, min(_END_BYTES, remote.size - end + 1))
        _write(path, end - 1, content)
        line_ends = b"\n" in content
        end += len(content) - 1
    set_time(path, remote)


def fetch_ranges(ranges: Iterable[tuple[Path, int, int]]) -> None:
    """Fill ranges of stand-ins' files, many at once: path, first byte, bytes.

    Raises:
        DataError: an object can't be read.
    """
    ranges = list(ranges)
    parts = [
        (path, first, min(_CHUNK_BYTES, start + size - first))
        for path, start, size in ranges
        for first in range(start, start + size, _CHUNK_BYTES)
    ]

    def fill(part: tuple[Path, int, int]) -> None:
        path, start, size = part
        _write(path, start, _object(path).read(start, size))

    for _ in spread_requests(fill, parts):
        pass
    for path in {path for path, _, _ in ranges}:
        set_time(path, _object(path))


def files_of(path: Path) -> list[tuple[Path, int]]:
    """Return the files of the stand-in that contains a path, with their sizes; [] if none does."""
    root = _root_of(path)
    return [] if root is None else [(root / entry.path, entry.size) for entry in _listed(root)[0].entries]


def fetch_ends(path: Path) -> None:
    """Fill both ends of a file, where formats have their schema."""
    size = path.stat().st_size
    fetch(path, 0, _END_BYTES)
    fetch(path, max(0, size - _END_BYTES), _END_BYTES)


def drop(path: Path) -> None:
    """Free the disk space of a stand-in's file; its size stays."""
    remote = _object(path)
    with path.open("r+b") as file:
        file.truncate(0)
        file.truncate(remote.size)
    set_time(path, remote)


def _object(path: Path) -> RemoteObject:
    remote = remote_of(path)
    assert remote is not None
    return remote


def _write(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), content, start)


def set_time(path: Path, remote: RemoteObject) -> None:
    """Give a file the time that is made of its object's version."""
    os.utime(path, ns=(remote.time_ns, remote.time_ns))


def tidy(folder: Path, keep: Sequence[str]) -> None:
    """Remove the files of all stand-ins in a folder, without listings and files with some suffixes."""
    for root in folder.glob(f"*{_SUFFIX}"):
        for parent, _, names in os.walk(root, topdown=False):
            for name in names:
                if name != _LISTING and not name.endswith(tuple(keep)):
                    (Path(parent) / name).unlink()
            with suppress(OSError):  # it still has files
                Path(parent).rmdir()


def _make(root: Path, listing: Listing) -> Path:
    """Make a stand-in; return the path of the corpus in it."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    listing.write(root / _LISTING)
    _listed.cache_clear()
    for entry in listing.entries:
        path = root / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(entry.size)
        set_time(path, remote_object(f"{listing.folder}/{entry.path}", entry))
    return root / listing.at


def _root_of(path: Path) -> Path | None:
    return next((p for p in (path, *path.parents) if p.suffix == _SUFFIX and (p / _LISTING).is_file()), None)


@lru_cache(maxsize=32)
def _listed(root: Path) -> tuple[Listing, dict[str, Entry]]:
    try:
        listing = Listing.read(root / _LISTING)
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "remove its folder under .cache/data and run again"
        raise DataError(f"{root / _LISTING}: missing or damaged ({error})", hint=hint) from None
    return listing, {entry.path: entry for entry in listing.entries}
