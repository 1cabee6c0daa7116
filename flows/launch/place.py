"""A job's place under a scheduler: its token, which names the one job that may run, and its file of orders.

The files lie in the job's launch folder, so a driver on another machine finds them.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from flows.launch.base import Handle
from hlatctl import node
from hlatctl.run import files


def base_of(handle: Handle) -> Path:
    """Return the beginning of the names of a job's files."""
    return Path(handle.launch_dir) / handle.name


def token_file(base: Path) -> Path:
    """Holds what a job compares with its own token, so that a job that was given up does nothing."""
    return base.with_name(f"{base.name}.token")


def read_token(base: Path) -> str:
    """Return the token of the newest job of this place; empty if none was ever to be submitted."""
    try:
        return token_file(base).read_text(encoding="utf-8").split()[-1]
    except (OSError, IndexError):
        return ""


def give_up(base: Path) -> None:
    """Change a job's token, so that its command does nothing if it starts late.

    It is changed in its place, because a full disk has no room for a new file; else it is removed.
    """
    path, token = token_file(base), read_token(base)
    try:
        with path.open("r+", encoding="utf-8") as file:
            file.write(f"given up {token}\n")
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()


def order(base: Path, what: str) -> str:
    """Write an order to the nodes of a job: ``stop``, ``end`` or ``stacks``. Return why it can't be written."""
    path = node.orders(base)
    try:
        files.write_json(path, {"v": 1, "what": what, "id": uuid.uuid4().hex})
    except OSError as error:
        return f"{path}: can't be written ({error.strerror})"
    return ""
