"""Reading every file of a cache and comparing it; moving aside what must not be used."""

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
    """How the modules of a store stand.

    Args:
        modules: all of them.
        compared: how many files a manifest tells the checksum of, and they have it.
        broken: why, by the module's name.
    """

    modules: list[Module]
    compared: int = 0
    broken: dict[str, str] = field(default_factory=dict)


def verify(store: Store) -> Verified:
    """Compare every file with the manifest; where there is none, only completeness and the headers of NEFFs."""
    entries = manifest.read(store)
    found = Verified(modules(store.files()))
    there = {file.path for module in found.modules for file in module.files}
    expected = {path: str(entry["sha256"]) for path, entry in (entries or {}).items()}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        reasons = pool.map(lambda module: _why_broken(store, module, expected, entries is not None), found.modules)
        found.broken = {module.name: reason for module, reason in zip(found.modules, reasons, strict=True) if reason}
    found.broken |= {path: f"{path}: missing" for path in sorted(expected.keys() - there)}
    found.compared = sum(
        file.path in expected for module in found.modules if module.name not in found.broken for file in module.files
    )
    return found


def move_aside(folder: Path, module: Module) -> None:
    """Put what is there of a module where nothing looks for it, under its name."""
    aside = folder / QUARANTINE / f"{module.name.replace('/', '__')}-{time.time_ns()}"
    aside.mkdir(parents=True)
    # What says that the module is complete goes first.
    for file in reversed(module.files):
        if (folder / file.path).is_symlink() or (folder / file.path).exists():
            (folder / file.path).replace(aside / file.path.rsplit("/", 1)[-1])


def quarantine(folder: Path, found: Verified) -> list[str]:
    """Move the broken modules of a folder aside, and out of its manifest; their names."""
    broken = [module for module in found.modules if module.name in found.broken]
    gone = {file.path for module in broken for file in module.files} | found.broken.keys()
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
