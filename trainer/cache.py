"""``python -m trainer.cache --from DIR --to DIR``: a verified copy of a compiled-graph cache on this worker's disk.

A shared file system under every worker's compiler made collectives time out (HLAT, arXiv 2404.10630), so each worker
reads its own copy. Graphs are code: only files that equal the manifest are copied. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import StorageError, run_main

MANIFEST = "cache_manifest.json"


def write_manifest(folder: Path) -> None:
    """Describe every file of a filled cache; last, so that a cache with a manifest is whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    files.write_json(folder / MANIFEST, {"v": 1, "files": files.describe_tree(folder)})


def copy(source: Path, target: Path) -> int:
    """Bring what is missing or differs; the number of files copied.

    Raises:
        StorageError: the source has no manifest or differs from it, or the target can't be written.
    """
    entries = _manifest(source)
    copied = 0
    try:
        for entry in entries:
            if files.first_difference(target, [entry]) is not None:
                _copy_file(source, target, entry)
                copied += 1
        files.write_json(target / MANIFEST, {"v": 1, "files": entries})
    except OSError as error:
        raise StorageError(
            f"{target}: can't be written ({error.strerror})", hint="set cluster.worker_cache_dir to a local folder"
        ) from None
    return copied


def _manifest(source: Path) -> list[dict[str, Any]]:
    path = source / MANIFEST
    try:
        entries = files.read_json(path)["files"]
        inside = all(_is_inside(source, entry["path"]) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: no readable manifest ({error}), so the cache was never completed",
            hint="remove the folder; the next run compiles it again",
        ) from None
    if not inside:
        raise StorageError(f"{path}: names a file outside of its folder", hint="remove the folder")
    return list(entries)


def _is_inside(root: Path, name: str) -> bool:
    return (root / name).resolve().is_relative_to(root.resolve())


def _copy_file(source: Path, target: Path, entry: dict[str, Any]) -> None:
    """Copy, then compare the copy: the bytes that were checked are the bytes that will be run."""
    destination = target / entry["path"]
    temporary_root = target / f".copy-{os.getpid()}"
    temporary = temporary_root / entry["path"]
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        if (source / entry["path"]).is_file():
            shutil.copyfile(source / entry["path"], temporary)
        difference = files.first_difference(temporary_root, [entry])
        if difference:
            raise StorageError(
                f"{source}: differs from its manifest: {difference}",
                hint="remove the folder; the next run compiles it again",
            )
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(destination)
    finally:
        shutil.rmtree(temporary_root, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Copy; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.cache", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", dest="target", type=Path, required=True)
    arguments = parser.parse_args(argv)
    copied = copy(arguments.source, arguments.target)
    print(f"{copied} files copied to {arguments.target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
