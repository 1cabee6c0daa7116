"""`hlatctl cache`: lists, verifies, copies, cleans up, exports and imports caches of compiled graphs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.app import App
from hlatctl.cli.common import Json, RunsDir, columns, place, print_json, runs_folder, say, write
from hlatctl.run.errors import StorageError
from hlatctl.run.paths import compile_cache_dir
from hlatctl.units import size, utc

if TYPE_CHECKING:
    from hlatctl.cache.store import Store

app = App("List, verify, copy and clean up caches of compiled graphs.")

Cache = Annotated[str, typer.Argument(metavar="CACHE", help="Name from `ls`, a folder, an archive, or s3://....")]
MaybeCache = Annotated[
    str | None,
    typer.Argument(metavar="CACHE", help="Name from `ls`, a folder, an archive, or s3://....  [default: all]"),
]


@app.command("ls")
def list_caches(cache: MaybeCache = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List the runs' caches, or the modules of one cache."""
    if cache is not None:
        _list_modules(_store(cache, runs_dir), as_json=as_json)
        return
    from hlatctl.cache.graphs import summary

    records = [summary(store) for store in _all(runs_dir)]
    if as_json:
        print_json(records)
    elif records:
        rows = [
            [
                record["name"],
                ", ".join(record["layouts"]) or "-",
                str(record["modules"]),
                str(record["incomplete"]),
                size(record["bytes"]),
                utc(record["written_unix_s"]) if record["written_unix_s"] else "-",
            ]
            for record in records
        ]
        write(columns([["CACHE", "LAYOUT", "MODULES", "INCOMPLETE", "SIZE", "WRITTEN"], *rows]))
    else:
        say(f"{compile_cache_dir(runs_folder(runs_dir))} contains no compiled graphs")


@app.command("verify")
def verify(
    cache: MaybeCache = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move broken modules to a quarantine folder.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Verify the checksum of every file in a cache."""
    from hlatctl.cache import graphs as verifying
    from hlatctl.cache.store import Folder

    stores = _all(runs_dir) if cache is None else [_store(cache, runs_dir)]
    broken = 0
    for store in stores:
        verified = verifying.verify_graphs(store)
        for reason in verified.broken.values():
            write(f"{store.name}: {reason}")
        good = len({module.name for module in verified.modules} - verified.broken.keys())
        write(f"{store.name}: {good} good modules, {verified.compared} files match their checksums")
        if quarantine and verified.broken and isinstance(store, Folder):
            moved = verifying.quarantine(store.root, verified)
            say(f"{store.name}: {len(moved)} modules moved to {store.root / verifying.QUARANTINE}")
        elif verified.broken:
            broken += len(verified.broken)
    if broken:
        raise StorageError(
            f"{broken} modules are broken or incomplete; they are never copied to workers",
            hint="--quarantine moves a folder's broken modules aside; the next run that needs them recompiles them",
        )


@app.command("warm")
def warm(
    cache: Cache,
    to: Annotated[Path, typer.Option("--to", help="Folder on this machine's local disk.", parser=place)],
    runs_dir: RunsDir = None,
) -> None:
    """Copy a cache's missing modules to a local folder.

    Copies only complete modules and verifies them. A module appears in the folder only when it is complete.
    """
    _copy(_store(cache, runs_dir), to.absolute())


@app.command("gc")
def collect(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Folder that contains the caches.  [default: the runs' caches]", parser=place
        ),
    ] = None,
    unused_days: Annotated[
        float, typer.Option(min=0, help="Delete caches that no run has used for this many days.")
    ] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Delete unused caches, broken modules and stale locks.

    Broken modules are those in quarantine, and those that a compilation left incomplete.
    """
    from hlatctl.cache import graphs
    from hlatctl.run.runs import compile_caches_used

    runs = runs_folder(runs_dir)
    root = folder.absolute() if folder else compile_cache_dir(runs)
    if folder and not root.is_dir():
        raise StorageError(f"{root}: no such folder")
    unused = graphs.find_waste(root, compile_caches_used(runs), unused_for_s=unused_days * 86400)
    for each in unused:
        write(f"{each.path}: {size(each.bytes)}: {each.why}")
    if not dry_run:
        graphs.remove_waste(unused)
    say(f"{size(sum(each.bytes for each in unused))} {'would be' if dry_run else 'were'} freed in {root}")


@app.command("export")
def export(
    cache: Cache,
    to: Annotated[Path, typer.Option("--to", help="Archive to create, such as graphs.tar.", parser=place)],
    runs_dir: RunsDir = None,
) -> None:
    """Export a cache's complete modules to an archive."""
    from hlatctl.cache import graphs
    from hlatctl.cache.store import Folder

    store = _store(cache, runs_dir)
    if not isinstance(store, Folder):
        raise StorageError(
            f"CACHE={cache}: is not a folder",
            hint=f"`hlatctl cache warm {cache} --to FOLDER` copies it to a folder first",
        )
    target = to.absolute()
    say(f"{graphs.export_archive(store.root, target)} modules, {size(target.stat().st_size)}")
    write(os.fspath(target))


@app.command("import")
def import_cache(
    source: Annotated[str, typer.Argument(metavar="ARCHIVE", help="Archive from `export`, a folder, or s3://....")],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Folder to import into.  [default: ARCHIVE's name among the runs' caches]",
            parser=place,
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Import a cache into the runs' caches."""
    from hlatctl.cache.store import open_store

    name = source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".tar")
    target = to.absolute() if to else compile_cache_dir(runs_folder(runs_dir)) / name
    _copy(open_store(source), target)


def _copy(store: Store, target: Path) -> None:
    from hlatctl.cache.warm import warm

    done = warm(store, target)
    for text in done.skipped:
        say(f"not copied: {text}")
    for text in done.quarantined:
        say(f"moved aside: {text}")
    say(f"{done.modules} modules, {done.copied} of them copied ({size(done.copied_bytes)})")
    write(os.fspath(target))


def _list_modules(store: Store, *, as_json: bool) -> None:
    from hlatctl.cache.store import modules

    listed = modules(store.files())
    if as_json:
        print_json([{**asdict(module), "bytes": module.bytes} for module in listed])
    elif listed:
        rows = [
            [each.name, each.layout, str(len(each.files)), size(each.bytes), each.problem or "ok"] for each in listed
        ]
        write(columns([["MODULE", "LAYOUT", "FILES", "SIZE", "STATE"], *rows]))
    else:
        say(f"{store.name}: contains no modules")


def _all(runs_dir: Path | None) -> list[Store]:
    from hlatctl.cache.graphs import caches
    from hlatctl.cache.store import Folder

    return [Folder(path) for path in caches(compile_cache_dir(runs_folder(runs_dir)))]


def _store(place: str, runs_dir: Path | None) -> Store:
    from hlatctl.cache.graphs import named_store

    return named_store(compile_cache_dir(runs_folder(runs_dir)), place)
