"""Read corpora in object storage (``data.path=s3://bucket/folder``): by ranges, ahead of need, and through stand-ins.

A corpus is listed once, and each object is read by ranges. Credentials come from the environment or the machine's role,
as for the remote folder of checkpoints.

``ReadAhead`` requests documents before they are needed, so that the latency of a request doesn't limit a reader.
Requests run in daemon threads of the process, :data:`IN_FLIGHT` at most. They don't delay the end of the process, and
don't block each other.

A stand-in is a local folder of sparse files with the names and sizes of the listed files. Code that needs a file's
content first fills the part that it needs: the headers of an Arrow file to index it, or a whole file to convert it. So
a stand-in is used exactly like a folder on a disk, and gives the same index, order and fingerprint. The folder's name
ends in ``.remote``, and it contains its listing. A prepared corpus keeps the listing, and the ``.idx`` files of token
ids.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from conf.listing import Entry, Listing, is_url, kept, kept_at
from conf.schema import Config
from hlatctl.cache.store import connect, within
from hlatctl.run import files
from hlatctl.run.errors import STORAGE_AWAY, DataError, DependencyError, StorageError, cannot_write
from hlatctl.run.redact import hide
from hlatctl.units import one_line

Document = TypeVar("Document", covariant=True)
_T = TypeVar("_T")
#: Requests in flight per process. At 100 ms each, 64 give 640 a second.
IN_FLIGHT = 64
#: Maximum documents that a process reads ahead, but at least one for each row and source. A row begins with a few, and
#: doubles its number each time it had to wait, so rows of long documents keep few documents in memory.
_MOST_AHEAD, _FIRST_AHEAD = 512, 4


class RemoteDocuments(Protocol[Document]):
    """Documents by position; reading some of them may need requests."""

    @property
    def is_remote(self) -> bool:
        """Whether reading a document needs requests."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Document: ...


class ReadAhead:
    """Documents that rows read in an order that is known in advance; ``readers`` rows and sources share the process."""

    def __init__(self, documents: RemoteDocuments[Any], readers: int) -> None:
        self._documents = documents
        self._most = max(1, _MOST_AHEAD // readers)
        self._waiting: dict[int, deque[Future[Any]]] = {}
        self._depth: dict[int, int] = {}
        self._lock, self._closed = threading.Lock(), False

    def read(self, row: int, nth: int, position_of: Callable[[int], int]) -> Any:
        """Return the ``nth`` document in a row's order, and request those that follow. A row reads them in order.

        ``position_of`` returns a document's position by its number.
        """
        waiting = self._waiting.setdefault(row, deque())
        depth = self._depth.setdefault(row, min(_FIRST_AHEAD, self._most))
        with self._lock:
            if self._closed:
                raise DataError("the reader of documents is closed")
            while len(waiting) <= depth:
                waiting.append(submit(partial(self._documents.__getitem__, position_of(nth + len(waiting)))))
            future = waiting[0]
        if not future.done():
            self._depth[row] = min(2 * depth, self._most)
        try:
            return future.result()
        except CancelledError:
            raise DataError("the reader of documents is closed") from None
        finally:
            waiting.popleft()

    def close(self) -> None:
        """End all waiting, including in threads that are waiting for a document now."""
        with self._lock:
            self._closed = True
            for future in (future for waiting in self._waiting.values() for future in waiting):
                with suppress(InvalidStateError):  # already read
                    future.set_exception(CancelledError())


def in_order(documents: RemoteDocuments[Document], positions: Iterable[int]) -> Iterator[Document]:
    """Yield the documents at some positions, reading those in object storage ahead."""
    if not documents.is_remote:
        yield from (documents[position] for position in positions)
        return
    yield from spread_requests(documents.__getitem__, positions)


def spread_requests(work: Callable[[Any], _T], tasks: Iterable[Any]) -> Iterator[_T]:
    """Yield the result of each task in order, with all threads at work."""
    waiting: deque[Future[_T]] = deque()
    for task in tasks:
        waiting.append(submit(partial(work, task)))
        if len(waiting) > 2 * IN_FLIGHT:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class _Pool:
    """Daemon threads: a process doesn't wait for them when it ends, unlike for those of ``concurrent.futures``."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads: Sequence[threading.Thread] = ()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        with self._lock:
            if not self._threads:
                self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(IN_FLIGHT)]
                for thread in self._threads:
                    thread.start()
        future: Future[_T] = Future()
        self._queue.put((future, work))
        return future

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.done():  # its reader has closed
                continue
            with suppress(InvalidStateError):  # its reader has closed meanwhile
                try:
                    future.set_result(work())
                except BaseException as error:  # raised where the document is needed
                    future.set_exception(error)


_pool = _Pool()


def submit(work: Callable[[], _T]) -> Future[_T]:
    """Call ``work`` in one of the process's threads for requests."""
    return _pool.submit(work)


#: A failing request is retried for this long; well below ``recovery.hang_floor_s``.
_PATIENCE_S = 240.0
#: Pause after the first failure; it doubles up to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 15.0
#: Names in fsspec's packages for what changes with an object's content; the first one present counts.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id", "mtime", "last_modified", "created")
_CHANGED_HINT = "restore the object; or index the changed corpus: `hlatctl resume`, which compares it with the run's"
#: botocore's options: a connection for each request in flight, and no retries besides those here.
_S3_OPTIONS = {"config_kwargs": {"max_pool_connections": IN_FLIGHT, "retries": {"total_max_attempts": 1}}}


def connect_corpus(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for reading a corpus with many requests in flight, and the path in it.

    Raises as :func:`hlatctl.cache.store.connect`.
    """
    return connect(url, **(_S3_OPTIONS if url.startswith(("s3://", "s3a://")) else {}))


def version_of(info: Mapping[str, Any]) -> str:
    """Return what changes with an object's content; empty if the storage doesn't provide it."""
    value = next((info[name] for name in _VERSIONS if info.get(name)), "")
    value = value.timestamp() if isinstance(value, datetime) else value  # listings of some packages have numbers
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class RemoteObject:
    """A listed object; threads may share it.

    Args:
        entry: its entry in the listing.

    Raises:
        StorageError, DependencyError: the URL is invalid, or a package is missing.
    """

    def __init__(self, url: str, entry: Entry) -> None:
        self.url, self.size, self._version = url, entry.size, entry.version
        self._system, self._path = connect_corpus(url)
        self._checked = False

    @property
    def time_ns(self) -> int:
        """Return a modification time that is derived from the version, so it changes with it."""
        return int.from_bytes(hashlib.sha256(self._version.encode()).digest()[:7], "little")

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the object. A failing request is retried with growing pauses, for a bounded time.

        Raises:
            DataError: the object has changed or is missing; or the storage doesn't answer (code ``STORAGE_AWAY``).
        """
        if not 0 <= start <= start + size <= self.size:
            raise DataError(f"{self.url}: bytes {start:,} to {start + size:,} are outside of the object")
        content = self._patiently(lambda: self._range(start, size)) if size else b""
        if len(content) != size:
            raise self._changed("it is shorter")
        return content

    def _range(self, start: int, size: int) -> bytes:
        if hasattr(self._system, "_call_s3"):
            return self._range_of_s3(start, size)
        self._check()
        # Other packages read exactly this range; huggingface_hub's would read a block of several MiB.
        exact = {"cache_type": "none"} if self.url.startswith(_HUB) else {}
        content: bytes = self._system.cat_file(self._path, start=start, end=start + size, **exact)
        return content

    def _range_of_s3(self, start: int, size: int) -> bytes:
        """Read a range on the condition that the object has the listed ETag: one request."""
        import fsspec.asyn

        bucket, key, _ = self._system.split_path(self._path)
        extent = f"bytes={start}-{start + size - 1}"

        async def get() -> bytes:
            answer = await self._system._call_s3(
                "get_object", Bucket=bucket, Key=key, Range=extent, IfMatch=self._version
            )
            async with answer["Body"] as body:
                content: bytes = await body.read()
                return content

        result: bytes = fsspec.asyn.sync(self._system.loop, get)
        return result

    def _check(self) -> None:
        """Compare size and version with the listing, once per process: a request of this protocol can't do it."""
        if not self._checked:
            info = self._system.info(self._path)
            if int(info["size"]) != self.size:
                raise self._changed(f"{int(info['size']):,} bytes, was {self.size:,}")
            if version_of(info) != self._version:
                raise self._changed("its version")
            self._checked = True

    def _patiently(self, request: Callable[[], _T]) -> _T:
        pause_s, failed_s = _FIRST_PAUSE_S, 0.0
        while True:
            try:
                return request()
            except DataError:
                raise
            except FileNotFoundError:
                raise DataError(
                    f"{self.url}: is missing, and was there when it was listed", hint=_CHANGED_HINT
                ) from None
            except Exception as error:  # any error of the service's own package
                if _code(error) in ("PreconditionFailed", "412"):
                    raise self._changed("its ETag") from None
                now_s = time.monotonic()
                failed_s = failed_s or now_s
                if now_s - failed_s >= _PATIENCE_S:
                    raise away(self.url, f"can't be read for {now_s - failed_s:.0f} s", error) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _changed(self, what: str) -> DataError:
        return DataError(f"{self.url}: has changed since it was listed ({what})", hint=_CHANGED_HINT)


@lru_cache(maxsize=1 << 16)
def remote_object(url: str, entry: Entry) -> RemoteObject:
    """Return an object, the same one each time, so that it is checked once."""
    return RemoteObject(url, entry)


def away(url: str, what: str, error: Exception) -> DataError:
    """Return the error for failing storage; it contains no credentials."""
    hint = (
        "check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE), and HF_TOKEN if its licence must be accepted; "
        "without a network, copy the files to a folder and set data.path to it"
        if _HUB in url
        else "check the URL, the network, and that the environment has credentials that may list and read it "
        "(s3://: AWS_PROFILE, AWS_ACCESS_KEY_ID or the machine's role)"
    )
    text = one_line(hide(str(error)))
    return DataError(f"{url}: {what} ({type(error).__name__}: {text})", hint=hint, code=STORAGE_AWAY)


def _code(error: Exception) -> str:
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


#: Datasets of the Hugging Face Hub: hf://datasets/ORG/NAME, with @REVISION and a folder if wanted.
_HUB = "hf://datasets/"


def _pinned(system: Any, root: str, url: str) -> tuple[str, str]:
    """Return path and URL of a dataset of the Hub at the commit that its revision names now; others unchanged.

    So a run reads one commit, also if the dataset gets another one, and its provenance names it.
    """
    if not url.startswith(_HUB):
        return root, url
    from huggingface_hub import HfApi  # with fsspec's package for these URLs

    at = system.resolve_path(root)
    commit = HfApi(endpoint=system.endpoint).repo_info(at.repo_id, repo_type="dataset", revision=at.revision).sha
    path = f"datasets/{at.repo_id}@{commit}/{at.path_in_repo}".rstrip("/")
    return path, f"hf://{path}"


#: A service that needs longer for a listing, with 1,000 files a page, is not usable.
_LIST_S = 90.0
#: Token ids can be named by the prefix of their two files, or by one of them.
_PAIR = (".bin", ".idx")


def list_corpus(runs_dir: str, url: str) -> Listing:
    """List a corpus now and keep the listing, from which fingerprints are computed.

    Args:
        runs_dir: the runs folder, where the listing is kept.
        url: URL of a folder, a file, or the prefix of token ids.

    Raises:
        DataError: it can't be listed, or is empty.
        DependencyError: the package for this kind of URL is missing.
        StorageError: the listing can't be written.
    """
    try:
        system, root = connect_corpus(url.rstrip("/"))
    except (StorageError, DependencyError) as error:
        raise type(error)(f"data.path={error.message}", hint=error.hint) from None
    try:
        listing = within(_LIST_S, lambda: _list(system, *_pinned(system, root, url.rstrip("/"))))
    except DataError:
        raise
    except Exception as error:  # any error of the service's own package
        raise away(f"data.path={url}", "can't be listed", error) from None
    if listing != kept(runs_dir, url):
        path = kept_at(runs_dir, url)
        try:
            with files.created_like(path.parent.parent):
                listing.write(path)
        except OSError as error:
            raise cannot_write(path, error, hint="free space, or set another runs_dir") from None
    return listing


def kept_or_listed(runs_dir: str, url: str) -> Listing:
    """Return the kept listing of a URL, or list it; raises as :func:`list_corpus`."""
    return kept(runs_dir, url) or list_corpus(runs_dir, url)


def _list(system: Any, root: str, url: str) -> Listing:
    found = _find(system, root)
    if found and set(found) != {root}:
        return _listing(url, "", root, found)
    prefix, name = root.rpartition("/")[0], root.rpartition("/")[2]
    if not found or name.endswith(_PAIR):
        base = root[: -len(_PAIR[0])] if name.endswith(_PAIR) else root
        found = {path: info for end in _PAIR for path, info in _find(system, base + end).items() if path == base + end}
    if not found:
        system.ls(root, detail=True)  # its error, such as a missing bucket, is clearer
        raise DataError(f"data.path={url}: the folder is empty", hint="name a folder that contains files")
    return _listing(url.rpartition("/")[0], name, prefix, found)


def _find(system: Any, root: str) -> dict[str, dict[str, Any]]:
    try:
        return {str(path): info for path, info in system.find(root, detail=True).items()}
    except FileNotFoundError:
        return {}


def _listing(folder: str, at: str, root: str, found: dict[str, dict[str, Any]]) -> Listing:
    names = {path[len(root) :].lstrip("/"): info for path, info in found.items() if not path.endswith("/")}
    for name, info in names.items():
        parts = PurePosixPath(name).parts
        if name != "/".join(parts) or ".." in parts or "\0" in name or any(str(p) in names for p in _above(name)):
            raise DataError(
                f"data.path={folder}: the object {name!r} can't be a file of a folder", hint="rename or move the object"
            )
        if not version_of(info):
            raise DataError(
                f"data.path={folder}/{name}: its storage tells neither ETag nor time of change, so a changed object "
                "would be used unnoticed",
                hint="copy the corpus to a storage that does, such as s3:// or gs://, or to a folder",
            )
    entries = [Entry(name, int(info["size"]), version_of(info)) for name, info in sorted(names.items())]
    return Listing(folder=folder, at=at, entries=tuple(entries))


def _above(name: str) -> list[PurePosixPath]:
    return list(PurePosixPath(name).parents)[:-1]


#: The hint for a damaged prepared corpus.
PREPARE_AGAIN = "remove its folder under .cache/data and run again"
_SUFFIX, _LISTING = ".remote", ".listing.json"
_ROOT = re.compile(rf"/[^\s'\"]*?{re.escape(_SUFFIX)}(?=/|\b)")
_CHUNK_BYTES = 2 << 20
#: Bytes at each end that a check of a file's schema or first line reads.
_END_BYTES = 256 << 10
#: Of a line's rest, at least what the readers of documents accept (``trainer.data.formats.MAX_TEXT_BYTES``).
_MAX_LINE_BYTES = 65 << 20


def is_remote(config: Config) -> bool:
    """Return whether a corpus of the configuration is in object storage."""
    return any(is_url(source.path) for source in config.data.inputs)


def stand_ins(config: Config, folder: Path, *, fresh: bool) -> Config:
    """Make a stand-in for each corpus in object storage; return the configuration with their paths.

    Args:
        folder: where to make them; those of a killed preparation are replaced.
        fresh: list the corpora now. Otherwise, earlier listings are used if there are any.

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

    Raises a DataError if the listing has no such file.
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
    """Return the URL that a path in a stand-in represents; any other path unchanged."""
    root = _root_of(Path(path))
    if root is None:
        return os.fspath(path)
    name = Path(path).relative_to(root).as_posix()
    return _listed(root)[0].folder + ("" if name == "." else f"/{name}")


def in_words(message: str) -> str:
    """Return a message with the URLs of stand-ins instead of their paths."""
    return _ROOT.sub(lambda match: shown(match[0]), message)


def fetch(path: Path, start: int = 0, size: int | None = None, *, whole_lines: bool = False) -> None:
    """Fill a range of a stand-in's file from its object; without a size, all that follows.

    ``whole_lines``: also the byte before, and the rest of the last line, up to a limit: readers refuse a longer line.
    Raises a DataError if the object can't be read.
    """
    remote = _object(path)
    end = remote.size if size is None else min(start + size, remote.size)
    start = max(0, start - 1) if whole_lines else start
    fetch_ranges([(path, start, end - start)])
    line_ends, most = not whole_lines, min(end + _MAX_LINE_BYTES, remote.size)
    while not line_ends and end < most:
        content = remote.read(end - 1, min(_END_BYTES, remote.size - end + 1))
        _write(path, end - 1, content)
        line_ends = b"\n" in content
        end += len(content) - 1
    set_time(path, remote)


def fetch_ranges(ranges: Iterable[tuple[Path, int, int]]) -> None:
    """Fill ranges (path, first byte, bytes) of stand-ins' files, many in parallel.

    Raises a DataError if an object can't be read.
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
    """Return the files of the stand-in that contains a path, with their sizes; [] if there is none."""
    root = _root_of(path)
    return [] if root is None else [(root / entry.path, entry.size) for entry in _listed(root)[0].entries]


def fetch_ends(path: Path) -> None:
    """Fill both ends of a file, where formats keep their schema."""
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
    """Set a file's modification time to the one derived from its object's version."""
    os.utime(path, ns=(remote.time_ns, remote.time_ns))


def tidy(folder: Path, keep: Sequence[str]) -> None:
    """Remove the files of all stand-ins in a folder, except listings and files with the suffixes in ``keep``."""
    for root in folder.glob(f"*{_SUFFIX}"):
        for parent, _, names in os.walk(root, topdown=False):
            for name in names:
                if name != _LISTING and not name.endswith(tuple(keep)):
                    (Path(parent) / name).unlink()
            with suppress(OSError):  # it still has files
                Path(parent).rmdir()


def _make(root: Path, listing: Listing) -> Path:
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
        raise DataError(f"{root / _LISTING}: missing or damaged ({error})", hint=PREPARE_AGAIN) from None
    return listing, {entry.path: entry for entry in listing.entries}
