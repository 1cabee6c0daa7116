"""The runs' caches of compiled graphs, and what each contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hlatctl.cache.layout import MANIFEST, modules
from hlatctl.cache.store import Folder, Store, open_store


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
