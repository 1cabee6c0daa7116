"""Listings of a corpus in object storage: its files when they were last listed. Uses only the standard library.

A listing is stored in ``<runs_dir>/.cache/listings``, because fingerprints are computed without the network.
``trainer.data.remote`` makes it whenever a configuration is checked.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.paths import cache_dir

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: str) -> bool:
    """Return whether a path has a scheme, such as ``s3://bucket/folder``."""
    return _SCHEME.match(path) is not None


@dataclass(frozen=True)
class Entry:
    """A listed file.

    Args:
        path: relative to the listing's folder.
        size: in bytes.
        version: changes with the content: the ETag, or else another value of the storage, such as the time of change.
    """

    path: str
    size: int
    version: str


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a corpus.

    Args:
        folder: URL that the paths are relative to.
        at: the corpus below it: a file, or the prefix of token ids; empty: the folder itself.
        entries: sorted by path.
    """

    folder: str
    at: str
    entries: tuple[Entry, ...]

    def write(self, path: Path) -> None:
        """Write the listing to a file."""
        files.write_sealed_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Listing:
        """Return the listing in a file.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is missing or damaged.
        """
        value = files.read_sealed_json(path)
        entries = tuple(Entry(**entry) for entry in value["entries"])
        return cls(folder=value["folder"], at=value["at"], entries=entries)


def kept_at(runs_dir: str, url: str) -> Path:
    """Return the file that stores the listing of a URL."""
    return cache_dir(Path(runs_dir)) / "listings" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"


def kept(runs_dir: str, url: str) -> Listing | None:
    """Return the stored listing of a URL; None if there is none."""
    try:
        return Listing.read(kept_at(runs_dir, url))
    except (OSError, ValueError, KeyError, TypeError):
        return None
