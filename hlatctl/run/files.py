"""Files: atomic writes, checked reads, locks, checksums, permissions, and dataclasses as JSON. Standard library only.

Files and folders appear complete or not at all: they are written under a temporary name, then renamed. Two modules
don't use this: ``hlatctl.node`` reserves the space of its records when it starts, and ``flows.stages.compile`` has jobs
on other nodes fill the temporary folder.

Readers expect files that are damaged or endless, and turn every failure into one kind of error.

Locks use ``flock``. The kernel drops a lock when its holder dies, so a dead process never holds one. A private folder
for temporary files is locked as long as its owner lives; the next process that creates one removes unlocked folders.
systemd-tmpfiles also ignores locked folders, however old their files are.

The first process on a node copies a shared file that all processes read at their start into the job's private folder;
the others read the copy. So 2,048 processes on 64 nodes open the shared file 64 times.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
import types
import typing
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO, RawIOBase
from pathlib import Path
from typing import IO, Any, TypeVar

from hlatctl.run.errors import DamagedFileError, HlatctlError, StorageError, cannot_write, first_line

#: Maximum time that a process takes to check whether a file is locked, if nothing delays it.
_LOOK_S = 0.001
#: After this time with shared locks only, they count, because a process keeps one.
_LOOKS_S = 10.0


def try_lock(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed. Return False if another process holds a lock that excludes this.

    Args:
        file: file or descriptor.
        shared: several processes may hold a shared lock at the same time.

    Raises:
        OSError: the file system doesn't support locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_file(path: Path, when_busy: Callable[[], None] | None = None) -> Iterator[FileIO]:
    """Lock a file and yield it, open for reading and appending. The file and its folder are created if missing.

    Args:
        when_busy: called each time another process holds the lock. It raises to give up, or returns to try again.
            None: wait until the lock is free. A process that only looks whether the file is locked has a shared lock
            for a moment, which doesn't count.

    Raises:
        StorageError: the file can't be written or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        began_s = time.monotonic()
        while not _lock(file, path, wait=when_busy is None):
            if when_busy and (time.monotonic() - began_s > _LOOKS_S or not _is_only_looked_at(file)):
                when_busy()
        yield file


def lock_folder(path: Path, *, shared: bool = False) -> int | None:
    """Lock a folder until the returned descriptor is closed.

    Returns:
        The descriptor. None if the folder is missing, is a symbolic link, is locked, or can't be locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if try_lock(descriptor, shared=shared):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def remove_unlocked(path: Path) -> None:
    """Remove a folder if no process has locked it: its owner has died."""
    lock = lock_folder(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _is_only_looked_at(file: FileIO) -> bool:
    """Return whether other processes hold only shared locks of a file."""
    if not try_lock(file, shared=True):
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    time.sleep(_LOOK_S)
    return True


def _lock(file: FileIO, path: Path, *, wait: bool) -> bool:
    try:
        if wait:
            fcntl.flock(file, fcntl.LOCK_EX)
        return wait or try_lock(file)
    except OSError as error:
        raise StorageError(
            f"{path}: can't be locked ({error.strerror})", hint="use a file system that supports flock"
        ) from None


#: Prefix of a folder's name while :func:`replace_folder` replaces it.
REPLACED = ".old-"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. When the block ends, the file is synced to disk and renamed to ``path``.

    If the block raises, the temporary file is removed and ``path`` stays as it was.
    """
    # Not the process id: hosts that share the folder use the same ids.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        fsync(temporary)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = os.fspath(path)  # an error while writing doesn't name the file
        raise


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. It is renamed to ``target`` when the block ends, or removed if the block raises.

    Its files and folders get the permissions that the umask gives to new ones: a person named the target, and libraries
    write files that only their owner can read.

    Raises:
        StorageError: the target exists and is not an empty folder, or can't be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StorageError(f"--to={target}: exists and is not an empty folder", hint="name another, or remove it")
    try:
        with partial_folder(target) as partial:
            mode = partial.stat().st_mode & 0o777
            yield partial
            _give(partial, mode)
            partial.rename(target)
            fsync(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from None


def _give(folder: Path, mode: int) -> None:
    for path, _, names in os.walk(folder):
        os.chmod(path, mode)
        for name in names:
            os.chmod(os.path.join(path, name), mode & 0o666)


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to the target, to fill and rename. It is removed at the end unless it was renamed.

    Folders for the same target that killed processes left are removed first. This process locks the folder, so that no
    other process removes it.
    """
    for left_over in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        remove_unlocked(left_over)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    lock = lock_folder(partial, shared=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def replace_folder(temporary: Path, target: Path) -> Path:
    """Rename a filled folder to its final name, durably, in place of a folder of that name. Return the final name."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    temporary.rename(target)
    fsync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries (a rename, a new file), survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Exceptions of reading a damaged record: a missing key, a value of another type, a huge number.
DAMAGED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
#: Files of this project are nested at most 10 deep. Code that walks through a value can rely on this limit.
_MAX_DEPTH = 100
#: Maximum whole number, with 20 digits. No count, size or seed is larger, and every smaller number fits in a float.
_MAX_INT = 2**64
_MAX_INT_DIGITS = 20
#: Limit of a file that is read as a whole, unless its reader names another one. A tokenizer of 1M words is smaller.
MAX_FILE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_LINE_FEED = 10


def parse_json(text: str | bytes, *, any_number: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: bytes must be UTF-8.
        any_number: also accept what other programs write: integers of any size, ``1e999``, ``NaN`` and ``Infinity``.

    Raises:
        ValueError: it is not JSON or not UTF-8, is nested too deep, or has a number out of range.
    """
    decoder = _ANY_NUMBER if any_number else _STRICT
    try:
        value = decoder.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    return value


def read_bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Return a regular file's content. Refuses a FIFO, which would block forever, and a file that fills the memory.

    Args:
        most: maximum size in bytes.

    Raises:
        OSError: it is missing, too large, not a regular file, or can't be read.
    """
    with open(path, "rb", opener=open_regular) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size_bytes <= most else b""  # kernel files and growing files can have more
        if size_bytes > most or len(content) > most:
            raise _too_large(path, max(size_bytes, len(content)), most)
        return content


def read_text(path: Path) -> str:
    """Return a regular file's content as UTF-8 text.

    Raises:
        OSError: it is missing, too large, not a regular file, or can't be read.
        ValueError: it is not UTF-8.
    """
    return read_bytes(path).decode()


def check_size(path: Path, most: int = MAX_FILE_BYTES) -> None:
    """Refuse a file that is too large, before a library reads it as a whole.

    Raises:
        OSError: it is missing, too large, or not a regular file.
    """
    with open(path, "rb", opener=open_regular) as file:
        size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes > most:
        raise _too_large(path, size_bytes, most)


def lines(file: IO[bytes], most: int, end: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file, each with its length in bytes, in bounded memory.

    A longer line than ``most`` bytes is cut to its beginning, and keeps its line feed if it has one.

    Args:
        file: also a decompressed one.
        most: bytes of a line that are kept.
        end: bytes of a line after which the rest of the file is not searched for its end; None: search all of it. A
            small compressed file can hold an almost endless line.

    Raises:
        OSError: a line is longer than ``end``.
    """
    while line := file.readline(most + 1):
        length = len(line)
        if length > most and line[-1] != _LINE_FEED:
            while block := file.readline(_BLOCK_BYTES):
                length += len(block)
                if end is not None and length > end:
                    raise OSError(errno.EFBIG, f"a line has more than {end:,} bytes")
                if block[-1] == _LINE_FEED:
                    line += b"\n"
                    break
        yield line, length


def open_regular(path: str, flags: int) -> int:
    """Open a regular file without blocking: ``open(path, opener=open_regular)``.

    Raises:
        OSError: it is missing, not a regular file, or can't be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is a folder" if stat.S_ISDIR(mode) else "is not a regular file", path)
    return descriptor


@contextmanager
def reading(path: Path, hint: str = "") -> Iterator[None]:
    """Turn every error of reading a file or its values into one that names the file.

    Raises:
        DamagedFileError: the file is missing, can't be read, or doesn't contain what the block expects.
    """
    try:
        yield
    except HlatctlError:
        raise
    except (OSError, *DAMAGED) as error:
        raise DamagedFileError(f"{path}: can't be used ({why(error)})", hint=hint) from None


def why(error: Exception) -> str:
    """Return an exception's message for a person. For a ``KeyError`` it says that the key is missing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return first_line(error)[:200]


def _too_large(path: Path, size_bytes: int, most: int) -> OSError:
    message = f"has {size_bytes:,} bytes, the limit is {most:,}"
    return OSError(errno.EFBIG, message, os.fspath(path))


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        items = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"is nested deeper than {_MAX_DEPTH} levels")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS + 1 or abs(int(text)) > _MAX_INT:
        raise ValueError(f"the number {text[:20]}… is out of range")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


_STRICT = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_no_constant)
_ANY_NUMBER = json.JSONDecoder()


_SEAL = "sha256"
_SEAL_LINE = "# sha256 of all lines above: "


#: Mode of folders that only their own user can read.
PRIVATE = 0o700


@contextmanager
def created_with(mode: int) -> Iterator[None]:
    """Create folders with this mode, and files with it except the right to execute, regardless of the umask.

    Applies to the whole process, and to processes that it starts in the block.
    """
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def created_like(folder: Path) -> Iterator[None]:
    """Create files and folders with the permissions of a folder; see :func:`created_with`."""
    with created_with(folder.stat().st_mode & 0o777 | PRIVATE if folder.is_dir() else PRIVATE):
        yield


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file completely or not at all, durably.

    Args:
        private: only this user can read the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write JSON completely or not at all, durably."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n", private=private)


def read_json(path: Path, most: int = MAX_FILE_BYTES) -> Any:
    """Read a JSON file.

    Args:
        most: maximum size in bytes.

    Raises:
        OSError: it is missing, too large, or can't be read.
        ValueError: it is not JSON. :func:`reading` raises an error that names the file.
    """
    return parse_json(read_bytes(path, most), any_number=True)


def write_sealed_json(path: Path, value: dict[str, Any], *, private: bool = False) -> None:
    """Write a JSON object with its own SHA-256, for :func:`read_sealed_json`."""
    write_json(path, {**value, _SEAL: sha256_json(value)}, private=private)


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read a JSON object and verify its seal if it has one.

    Raises:
        OSError, ValueError: it is missing, is not a JSON object, or is damaged.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, expected an object")
    seal = value.pop(_SEAL, None)
    if seal is not None and seal != sha256_json(value):
        raise ValueError("is not as it was written")
    return value


def seal_lines(text: str) -> str:
    """Return text with its SHA-256 in a comment (``#``) as the last line, for :func:`unseal_lines`."""
    return f"{text}{_SEAL_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def unseal_lines(text: str) -> tuple[str, bool]:
    """Return the text before its seal, and whether it has one.

    Raises:
        ValueError: it doesn't match its seal.
    """
    before, mark, seal = text.rpartition(_SEAL_LINE)
    if not mark:
        return text, False
    if seal.strip() != hashlib.sha256(before.encode()).hexdigest():
        raise ValueError("is not as it was written")
    return before, True


class Hashed(RawIOBase):
    """A file whose bytes are hashed as they are read or written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most so many."""
        block = self._file.read(size)
        self.digest.update(block)
        return block

    def write(self, block: Any) -> int:
        """Write bytes; return how many."""
        self.digest.update(block)
        return self._file.write(block)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, as hex. It doesn't depend on layout or order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_tree(root: Path) -> list[dict[str, Any]]:
    """Return ``[{"path", "bytes", "sha256"}]`` of all files below a folder, sorted."""
    return [describe(root, path) for path in sorted(path for path in root.rglob("*") if path.is_file())]


def describe(root: Path, path: Path) -> dict[str, Any]:
    """Return a file's entry for :func:`describe_tree`."""
    return {"path": path.relative_to(root).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def first_difference(root: Path, files: list[dict[str, Any]], *, checksums: bool = True) -> str | None:
    """Return the first listed file that is missing or differs, as ``"name: reason"``. None if all match.

    Files are hashed in parallel: SHA-256 of one stream is 1.8 GB/s, less than fast storage reads.
    """
    if not checksums or len(files) < 2:
        return next(filter(None, (_difference(root, entry, checksums=checksums) for entry in files)), None)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return next(filter(None, pool.map(lambda entry: _difference(root, entry, checksums=True), files)), None)


def _difference(root: Path, entry: dict[str, Any], *, checksums: bool) -> str | None:
    path = root / entry["path"]
    if not path.is_file():
        return f"{entry['path']}: missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{entry['path']}: {path.stat().st_size} bytes, expected {entry['bytes']}"
    if checksums and sha256_file(path) != entry["sha256"]:
        return f"{entry['path']}: checksum differs"
    return None


#: Names the private folder of a job for its processes.
JOB_FOLDER_ENV = "HLATCTL_JOB_FOLDER"

#: Prefix of every folder that this module creates, and may therefore remove.
_PREFIX = "hlatctl-tmp-"


@dataclass(frozen=True)
class Scratch:
    """A private folder.

    Args:
        path: has mode 0700; it is short because it contains sockets, whose paths are limited.
        lock: descriptor of the lock. The folder also stays while a child that inherited it lives.
    """

    path: Path
    lock: int


@contextmanager
def private_folder(kind: str, *, within: str | None = None) -> Iterator[Scratch]:
    """Create a private folder and remove it at the end. Remove those that dead processes left.

    Args:
        kind: part of the folder's name.
        within: the folder to create it in; None: the system's folder for temporary files.
    """
    parent = Path(within or tempfile.gettempdir())
    _sweep(parent)
    made = _make(parent, kind)
    try:
        yield made
    finally:
        shutil.rmtree(made.path, ignore_errors=True)
        os.close(made.lock)


def _make(parent: Path, kind: str) -> Scratch:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=parent))
        lock = lock_folder(path)
        if lock is not None and path.is_dir():
            return Scratch(path, lock)
        if lock is not None:  # another process removed it before it was locked
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove folders that dead processes of this user left. Ignore symbolic links."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            remove_unlocked(Path(entry.path))


def files_below(folder: Path, *, most: int, depth: int | None = None) -> list[Path]:
    """Return the files below a folder, sorted. Links to folders are not followed, unreadable folders are skipped.

    Args:
        most: maximum number of files and folders; a local disk lists about 100,000 a second.
        depth: maximum depth in folders; None: any.

    Raises:
        ValueError: there are more than ``most``.
    """
    found: list[Path] = []
    left, seen = [(folder, 0)], 0
    while left:
        place, level = left.pop()
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                seen += 1
                if seen > most:
                    raise ValueError(f"has more than {most:,} files and folders")
                if not entry.is_dir(follow_symlinks=False):
                    found.append(Path(entry.path))
                elif depth is None or level < depth:
                    left.append((Path(entry.path), level + 1))
    return sorted(found)


def read_shared_text(path: Path) -> str:
    """Return a file's content as UTF-8 text, from this node's copy if the process belongs to a job.

    If the file can't be copied, the original is read. It must not change while the job runs, and no other file of the
    same name may be read like this.

    Raises:
        OSError: the file is missing, not a regular file, or can't be read.
        ValueError: it is not UTF-8.
    """
    folder = os.environ.get(JOB_FOLDER_ENV)
    if folder is None:
        return read_text(path)
    copy = Path(folder) / path.name
    try:
        with locked_file(copy.with_name(f".{path.name}.lock")):
            if not copy.exists():
                content = read_bytes(path)
                with new_file(copy) as temporary:
                    temporary.write_bytes(content)
        return read_text(copy)
    except (OSError, StorageError):
        return read_text(path)


T = TypeVar("T")


def from_plain(kind: type[T], value: Any) -> T:
    """Return a dataclass from the JSON value of ``dataclasses.asdict``.

    Raises:
        TypeError: a value has another type than its field, or a field is missing or unknown.
    """
    found: T = _of(kind, value)
    return found


def _of(kind: Any, value: Any) -> Any:
    origin: Any = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None or type(value) in parts:
            return value
        return _of(next(part for part in parts if part is not type(None)), value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints: dict[str, Any] = _hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            raise TypeError(f"{kind}: {value!r:.80}")
        return kind(**{name: _of(hints[name], item) for name, item in value.items()})
    if kind not in _JSON and isinstance(kind, type) and isinstance(value, kind):
        return value  # the caller created it
    if type(value) not in _JSON[origin or kind]:
        raise TypeError(f"{kind}: {value!r:.80}")
    return _collection(origin, parts, value) if origin else value


def _collection(origin: Any, parts: tuple[Any, ...], value: Any) -> Any:
    if origin is list:
        return [_of(parts[0], item) for item in value]
    if origin is tuple:
        return tuple(_of(part, item) for part, item in zip(parts, value, strict=True))
    # JSON's keys are text.
    return {(int(key) if parts[0] is int else key): _of(parts[1], item) for key, item in value.items()}


#: The JSON types of a field's type.
_JSON: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (float, int),
    list: (list,),
    tuple: (list,),
    dict: (dict,),
}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
