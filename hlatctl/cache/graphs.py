"""Caches of compiled graphs: list, verify, copy, export and clean them up.

``cache_manifest.json`` has the sizes and checksums of a cache's files. It is written last, so a cache with one is
complete. In a worker's own copy it also has each file's modification time: a verified file is not read again while its
size and time are unchanged and the machine has not been rebooted.

An exported cache is a tar archive of its complete modules and their manifest. Equal caches give equal bytes.

Neuron's and Inductor's wrappers lock a file with ``flock`` while they compile. When they die, the kernel releases the
lock but the file stays. Where the file's existence is the lock, later processes would wait forever, so stale lock files
are removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlatctl.cache.store import (
    MANIFEST,
    File,
    Folder,
    Module,
    Source,
    Store,
    is_lock,
    is_transient,
    modules,
    open_store,
    why_no_neff,
)
from hlatctl.run import files
from hlatctl.run.errors import StorageError, cannot_write
from hlatctl.run.files import DAMAGED, MAX_FILE_BYTES, new_file, parse_json, try_lock, why

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Entry = dict[str, Any]


def write_manifest(folder: Path) -> None:
    """Describe every file of a filled cache."""
    (folder / MANIFEST).unlink(missing_ok=True)
    paths = [file.path for module in modules(Folder(folder).files()) if not module.problem for file in module.files]
    write_entries(folder, (describe(folder, path) for path in sorted(paths)))


def describe(folder: Path, path: str) -> Entry:
    """Return a file's entry."""
    return {"path": path, "bytes": (folder / path).stat().st_size, "sha256": files.sha256_file(folder / path)}


def write_entries(folder: Path, entries: Iterable[Entry]) -> None:
    """Write a manifest of known entries, atomically."""
    files.write_text(folder / MANIFEST, manifest_text(entries, boot=boot_id()))


def manifest_text(entries: Iterable[Entry], *, boot: str) -> str:
    """Return a manifest's content."""
    ordered = sorted(entries, key=lambda entry: str(entry["path"]))
    return json.dumps({"v": 1, "boot_id": boot, "files": ordered}, separators=(",", ":")) + "\n"


def read_manifest(store: Store) -> dict[str, Entry] | None:
    """Return the entries by path, without locks; None if the store has no manifest.

    Raises:
        StorageError: the manifest can't be read, or names a file outside the cache.
    """
    value = _read(store)
    return None if value is None else _by_path(value)


def read_own_manifest(folder: Path) -> tuple[dict[str, Entry], bool]:
    """Return a worker's own entries (none without a valid manifest), and whether they are newer than the last boot."""
    try:
        value = _read(Folder(folder))
    except StorageError:
        value = None  # the copy is verified again
    if value is None:
        return {}, False
    return _by_path(value), bool(boot_id()) and value.get("boot_id") == boot_id()


def boot_id() -> str:
    """Return this boot's id: after a power cut, a file's size and time don't prove that its blocks were written."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _by_path(value: dict[str, Any]) -> dict[str, Entry]:
    return {entry["path"]: entry for entry in value["files"] if not is_transient(entry["path"])}


def _read(store: Store) -> dict[str, Any] | None:
    try:
        with store.open(MANIFEST) as file:
            content = file.read(MAX_FILE_BYTES + 1) or b""
    except (FileNotFoundError, KeyError):
        return None
    except OSError as error:
        raise StorageError(f"{store.name}/{MANIFEST}: can't be read ({error.strerror})") from None
    try:
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"has more than {MAX_FILE_BYTES:,} bytes")
        value = dict(parse_json(content))
        value["files"] = [
            {**entry, "path": str(entry["path"]), "bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for entry in value["files"]
        ]
    except DAMAGED as error:
        raise StorageError(
            f"{store.name}/{MANIFEST}: no readable manifest ({why(error)})",
            hint="remove the folder; the next run compiles it again",
        ) from None
    for path in (entry["path"] for entry in value["files"]):
        if path.startswith("/") or ".." in path.split("/"):
            raise StorageError(
                f"{store.name}/{MANIFEST}: names a file outside its folder: {path}", hint="remove the folder"
            )
    return value


_BUFFER_BYTES = 1 << 20
_HEAD_BYTES = 64

_local = threading.local()


class BrokenError(Exception):
    """A file of a store is missing, unreadable or different from its checksum."""


def copy_checked(source: Source, file: File, target: Path, sha256: str | None) -> Entry:
    """Copy a file and hash the bytes that are written; return its entry.

    Raises:
        BrokenError: the source can't be read or is damaged.
    """
    digest, size, buffer = hashlib.sha256(), 0, _buffer()
    with io.FileIO(target, "w") as output:
        for block in _blocks(source, file.path, buffer):
            if (
                size == 0
                and sha256 is None
                and file.path.endswith(".neff")
                and (why := why_no_neff(bytes(block[:_HEAD_BYTES]), file.bytes))
            ):
                raise BrokenError(f"{file.path}: {why}")
            digest.update(block)
            size += len(block)
            _write_all(output, block)
        mtime_ns = os.fstat(output.fileno()).st_mtime_ns
    actual = digest.hexdigest()
    if size != file.bytes:
        raise BrokenError(f"{file.path}: {size} bytes, expected {file.bytes}")
    if sha256 is not None and actual != sha256:
        raise BrokenError(f"{file.path}: checksum differs")
    return {"path": file.path, "bytes": size, "sha256": actual, "mtime_ns": mtime_ns}


def sha256_of(store: Store, path: str) -> str:
    """Return the SHA-256 of a file, as hex.

    Raises:
        BrokenError: it can't be read.
    """
    digest = hashlib.sha256()
    for block in _blocks(store, path, _buffer()):
        digest.update(block)
    return digest.hexdigest()


def head_of(store: Store, path: str) -> bytes:
    """Return a file's first 64 bytes.

    Raises:
        BrokenError: it can't be read.
    """
    return next((bytes(block[:_HEAD_BYTES]) for block in _blocks(store, path, _buffer()[:_HEAD_BYTES])), b"")


def _buffer() -> memoryview:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BUFFER_BYTES))
    buffer: memoryview = _local.buffer
    return buffer


def _blocks(store: Source, path: str, buffer: memoryview) -> Iterator[memoryview]:
    try:
        with store.open(path) as stream:
            while count := stream.readinto(buffer):
                yield buffer[:count]
    except FileNotFoundError:
        raise BrokenError(f"{path}: missing") from None
    except OSError as error:
        raise BrokenError(f"{path}: can't be read ({error.strerror or error})") from None


def _write_all(output: io.FileIO, block: memoryview) -> None:
    while block:
        block = block[output.write(block) or 0 :]


QUARANTINE = ".quarantine"
_THREADS = 16


@dataclass
class Verified:
    """The result of a verification.

    Args:
        compared: number of files whose checksum equals the manifest's.
        broken: the reason by module name.
    """

    modules: list[Module]
    compared: int = 0
    broken: dict[str, str] = field(default_factory=dict)


def verify_graphs(store: Store) -> Verified:
    """Compare every file with the manifest; without one, check only completeness and the headers of NEFFs."""
    entries = read_manifest(store)
    verified = Verified(modules(store.files()))
    there = {file.path for module in verified.modules for file in module.files}
    expected = {path: str(entry["sha256"]) for path, entry in (entries or {}).items()}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        reasons = pool.map(lambda module: _why_broken(store, module, expected, entries is not None), verified.modules)
        verified.broken = {
            module.name: reason for module, reason in zip(verified.modules, reasons, strict=True) if reason
        }
    verified.broken |= {path: f"{path}: missing" for path in sorted(expected.keys() - there)}
    verified.compared = sum(
        file.path in expected
        for module in verified.modules
        if module.name not in verified.broken
        for file in module.files
    )
    return verified


def move_aside(folder: Path, module: Module) -> None:
    """Move the existing files of a module to the quarantine folder, under the module's name."""
    aside = folder / QUARANTINE / f"{module.name.replace('/', '__')}-{time.time_ns()}"
    aside.mkdir(parents=True)
    # The file that marks the module as complete goes first.
    for file in reversed(module.files):
        if (folder / file.path).is_symlink() or (folder / file.path).exists():
            (folder / file.path).replace(aside / file.path.rsplit("/", 1)[-1])


def quarantine(folder: Path, verified: Verified) -> list[str]:
    """Move the broken modules of a folder aside and remove them from its manifest; return their names."""
    broken = [module for module in verified.modules if module.name in verified.broken]
    gone = {file.path for module in broken for file in module.files} | verified.broken.keys()
    entries, _ = read_own_manifest(folder)
    if (folder / MANIFEST).is_file():
        write_entries(folder, [entry for path, entry in entries.items() if path not in gone])
    for module in broken:
        move_aside(folder, module)
    return [module.name for module in broken]


def _why_broken(store: Store, module: Module, expected: dict[str, str], has_manifest: bool) -> str:
    if module.problem:
        return module.problem
    try:
        for file in module.files:
            if file.path.endswith(".neff") and (why := why_no_neff(head_of(store, file.path), file.bytes)):
                return f"{file.path}: {why}"
            if has_manifest and file.path not in expected:
                return f"{file.path}: is not in {MANIFEST}"
            if has_manifest and sha256_of(store, file.path) != expected[file.path]:
                return f"{file.path}: checksum differs"
    except BrokenError as broken:
        return str(broken)
    return ""


def export_archive(folder: Path, to: Path) -> int:
    """Write a folder's complete modules into an archive, atomically; return how many.

    Raises:
        StorageError: a module differs from the manifest, none is complete, or the archive can't be written.
    """
    store = Folder(folder)
    verified = verify_graphs(store)
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
            _add(archive, MANIFEST, io.BytesIO(manifest_text(entries, boot="").encode()))
            for entry in entries:
                with (folder / entry["path"]).open("rb") as file:
                    _add(archive, entry["path"], file)
    except OSError as error:
        raise cannot_write(to, error) from None
    return len(whole)


def _entries(folder: Path, paths: list[str]) -> list[Entry]:
    known, store = read_manifest(Folder(folder)) or {}, Folder(folder)
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


#: A lock that no process holds here may be held on another machine if the storage does not share locks. No compilation
#: this long is known; if one occurs, its graph is compiled twice, which does no harm.
STALE_AFTER_S = 3600.0


def remove_stale(folder: Path, files: Iterable[File]) -> list[str]:
    """Remove the stale locks below a folder; return their paths."""
    return [
        file.path for file in files if is_lock(file.path) and _is_old(file) and _free(folder / file.path, remove=True)
    ]


def is_stale(folder: Path, file: File) -> bool:
    """Return whether no process holds a lock and it is older than an hour."""
    return _is_old(file) and _free(folder / file.path, remove=False)


def _is_old(file: File) -> bool:
    return not file.problem and time.time() - file.mtime_ns / 1e9 > STALE_AFTER_S


def _free(path: Path, *, remove: bool) -> bool:
    """Return whether no process holds a lock file. It is locked here while it is removed."""
    try:
        with path.open("rb") as file:
            free = try_lock(file)
            if free and remove:
                path.unlink()
            return free
    except OSError:  # missing, or this user may not open it
        return False


def named_store(root: Path, name: str) -> Store:
    """Return the cache of that name below ``root``, or else the folder, archive or URL."""
    known = root / name
    return Folder(known) if "/" not in name and known.is_dir() else open_store(name)


def summary(store: Store) -> dict[str, Any]:
    """Return a cache's layouts, its numbers of modules and bytes, and when it was written."""
    files = store.files()
    listed = modules(files)
    written_ns = next((file.mtime_ns for file in files if file.path == MANIFEST), 0)
    return {
        "name": Path(store.name).name,
        "path": store.name,
        "layouts": sorted({module.layout for module in listed}),
        "modules": len(listed),
        "incomplete": sum(bool(module.problem) for module in listed),
        "bytes": sum(module.bytes for module in listed),
        "written_unix_s": written_ns / 1e9 or None,
    }


#: Unfinished work of this age is abandoned.
_ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True)
class Waste:
    """Something that can be deleted.

    Args:
        path: a folder or a file.
    """

    path: Path
    bytes: int
    why: str


def caches(root: Path) -> list[Path]:
    """Return the caches below a folder that has one per fingerprint."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def find_waste(root: Path, last_used_unix_s: dict[str, float], *, unused_for_s: float) -> list[Waste]:
    """Return what can be deleted below a folder of caches.

    Args:
        root: folder with one cache per fingerprint.
        last_used_unix_s: last use by a run, by fingerprint; writing a cache also counts as use.
        unused_for_s: delete caches that were not used for this long.
    """
    now = time.time()
    waste = [
        Waste(path, _size(path), "left by an interrupted compilation")
        for path in (root.iterdir() if root.is_dir() else ())
        if path.name.endswith(".partial") and now - path.stat().st_mtime > _ABANDONED_AFTER_S
    ]
    for cache in caches(root):
        written = (cache / MANIFEST if (cache / MANIFEST).exists() else cache).stat().st_mtime
        idle_s = now - max(written, last_used_unix_s.get(cache.name, 0.0))
        if idle_s > unused_for_s:
            waste.append(Waste(cache, _size(cache), f"no run has used it for {idle_s / 86400:.0f} days"))
        else:
            waste += _leftovers(cache, now)
    return waste


def remove_waste(wasted: list[Waste]) -> None:
    """Delete files and folders.

    Raises:
        StorageError: something can't be deleted.
    """
    for each in wasted:
        try:
            if each.path.is_dir() and not each.path.is_symlink():
                shutil.rmtree(each.path)
            else:
                each.path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{each.path}: can't be deleted ({error.strerror})") from None


def _leftovers(cache: Path, now: float) -> Iterator[Waste]:
    listing = Folder(cache).files()
    if (cache / QUARANTINE).is_dir():
        yield Waste(cache / QUARANTINE, _size(cache / QUARANTINE), "modules that were moved aside")
    for file in listing:
        if is_lock(file.path) and not file.path.startswith(".") and is_stale(cache, file):
            yield Waste(cache / file.path, file.bytes, "a lock that nobody holds")
    for module in modules(listing):
        newest_s = max(file.mtime_ns for file in module.files) / 1e9
        if module.problem and now - newest_s > _ABANDONED_AFTER_S:
            for file in module.files:
                yield Waste(cache / file.path, file.bytes, module.problem)


def _size(path: Path) -> int:
    return sum(file.bytes for file in Folder(path).files()) if path.is_dir() else path.lstat().st_size
