"""Verify every file of a cache, and move broken modules aside."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hlatctl.cache import manifest
from hlatctl.cache.layout import MANIFEST, Module, modules, why_no_neff
from hlatctl.cache.store import Store
from hlatctl.cache.transfer import BrokenError, head_of, sha256_of

QUARANTINE = ".quarantine"
_THREADS = 16


@dataclass
class Verified:
    """The result of a verification.

    Args:
        modules: of the store.
        compared: number of files whose checksum equals the manifest's.
        broken: the reason, by the module's name.
    """

    modules: list[Module]
    compared: int = 0
    broken: dict[str, str] = field(default_factory=dict)


def verify(store: Store) -> Verified:
    """Compare every file with the manifest; without one, check only completeness and the headers of NEFFs."""
    entries = manifest.read(store)
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
    entries, _ = manifest.read_own(folder)
    if (folder / MANIFEST).is_file():
        manifest.write(folder, [entry for path, entry in entries.items() if path not in gone])
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
