"""Check that only this user and root can write to folders from which graphs and environments are run.

A graph is code that runs with all rights of the user who trains. Checksums protect it from damage, not from another
user: whoever can change a graph can change the manifest too.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from hlatctl.run.errors import StorageError, cannot_write

_ROOT = 0
_RULE = "code is only run from folders that no other user can write to"
_WRITE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create a folder for compiled graphs, and its missing parents, for this user alone.

    Raises:
        StorageError: :func:`require_own` refuses it, or it can't be created.
    """
    folder = Path(os.path.abspath(folder))
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not os.path.lexists(path)]):
            missing.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        hint = "use another folder (cluster.worker_cache_dir, runs_dir, --to)"
        raise cannot_write(folder, error, hint=hint) from None
    require_own(folder)


def require_own(place: Path, rule: str = _RULE, hint: str = "") -> None:
    """Refuse a file or folder, such as a cache, that another user could have filled, or can replace.

    The folder or archive must belong to this user or root, and no other user may write to it. Below a folder that
    all users may write to (``/tmp``), every folder on the path must belong to them too.

    Args:
        rule: reason for the requirement, shown in the error.
        hint: hint of the error; empty: how to use another cache.

    Raises:
        StorageError: another user owns or may write to one of these.
    """
    place = Path(os.path.abspath(place))
    # A link on the path could be replaced later, so its location must be as safe as its target.
    for path in dict.fromkeys([place, Path(os.path.realpath(place))]):
        _require_own_way(path, rule, hint)


def belongs_to_us(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root."""
    return status.st_uid in (os.geteuid(), _ROOT)


def _require_own_way(place: Path, rule: str, hint: str) -> None:
    open_to_all = False
    for path in (*reversed(place.parents), place):
        status = _status(path)
        if (open_to_all or path == place) and not belongs_to_us(status):
            _refuse(place, path, f"belongs to user {status.st_uid}, not to you; {rule}", hint)
        if stat.S_ISLNK(status.st_mode):
            continue
        mode = f"other users may write there (mode {stat.S_IMODE(status.st_mode):04o})"
        if path == place and status.st_mode & _WRITE_FOR_OTHERS:
            _refuse(place, path, f"{mode}; {rule}", hint)
        if path != place and status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            sticky = f"`chmod +t {shlex.quote(os.fspath(path))}` lets users replace only their own files there"
            raise StorageError(f"{path}: {mode}, and could replace {place}; {rule}", hint=sticky)
        open_to_all = open_to_all or bool(status.st_mode & stat.S_IWOTH)


def _status(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError as error:
        raise StorageError(f"{path}: can't be examined ({error.strerror})", hint=f"see `ls -ld {path}`") from None


def _refuse(place: Path, path: Path, why: str, hint: str) -> None:
    quoted = shlex.quote(os.fspath(place))
    raise StorageError(
        f"{path}: {why}",
        hint=hint
        or f"if you trust its contents, copy it: `cp -r --no-preserve=all {quoted} COPY && "
        f"chmod -R go-w COPY`, and use COPY; else use another folder (cluster.worker_cache_dir, runs_dir, --to)",
    )
