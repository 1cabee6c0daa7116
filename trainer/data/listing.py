"""Lists a corpus in object storage (``data.path=s3://bucket/folder``)."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from conf.listing import Entry, Listing, kept, kept_at
from hlatctl.cache.objects import within
from hlatctl.run import files
from hlatctl.run.errors import DataError, DependencyError, StorageError, cannot_write
from trainer.data.remote import away, connect_corpus, version_of

#: A service that needs longer for a listing, of which a page has 1,000 files, is not usable.
_LIST_S = 90.0
#: Token ids can be named by the prefix of their two files, or by one of them.
_PAIR = (".bin", ".idx")


def list_corpus(runs_dir: str, url: str) -> Listing:
    """List a corpus now and keep the listing, from which fingerprints are computed.

    Args:
        runs_dir: that keeps it.
        url: of a folder, a file, or the prefix of token ids.

    Raises:
        DataError: it can't be listed, or nothing is there.
        DependencyError: the package for this kind of URL is missing.
        StorageError: the listing can't be written.
    """
    try:
        system, root = connect_corpus(url.rstrip("/"))
    except (StorageError, DependencyError) as error:
        raise type(error)(f"data.path={error.message}", hint=error.hint) from None
    try:
        listing = within(_LIST_S, lambda: _list(system, root, url.rstrip("/")))
    except DataError:
        raise
    except Exception as error:  # whatever the service's own package raises
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
        system.ls(root, detail=True)  # its error, such as a missing bucket, says more
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
    """Return the folders above a file, without the root."""
    return list(PurePosixPath(name).parents)[:-1]
