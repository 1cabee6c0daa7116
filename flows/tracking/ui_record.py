"""``<runs_dir>/.ui.json``: where a `hlatctl ui` that runs now answers, and its password. For its own user only."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.errors import RunBusyError
from hlatctl.run.lease import Holder, hold, holder
from hlatctl.run.reading import DAMAGED


@dataclass(frozen=True, kw_only=True)
class UiRecord:
    """Two servers.

    Args:
        prefect: its address; none: it has not started.
        mlflow: its address; none: it has not started.
        auth: ``USER:PASSWORD`` for both.
    """

    auth: str
    prefect: str | None = None
    mlflow: str | None = None


def ui_file(runs_dir: Path) -> Path:
    """The file."""
    return runs_dir / ".ui.json"


def ui_dir(runs_dir: Path) -> Path:
    """The folder of the servers' logs."""
    return runs_dir / ".ui"


@contextmanager
def only_ui(runs_dir: Path) -> Iterator[None]:
    """Be the only `hlatctl ui` of a runs folder.

    Raises:
        RunBusyError: there is one.
        StorageError: the folder can't be written.
    """

    def refuse(other: Holder) -> None:
        raise RunBusyError(f"runs_dir={runs_dir}: {other} serves it already", hint=f"kill {other.pid} ends that one")

    with hold(_lease(runs_dir), refuse):
        yield


@contextmanager
def announced(runs_dir: Path, record: UiRecord) -> Iterator[None]:
    """Let this user's flows know of the servers; for whoever is the ``only_ui``."""
    path = ui_file(runs_dir)
    files.write_json(path, {"v": 2, "pid": os.getpid(), **asdict(record)}, private=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read(runs_dir: Path) -> UiRecord | None:
    """The `hlatctl ui` of this user that serves a runs folder now.

    A file of somebody else's, or that others can read or have written, is not believed: it could name a server that
    collects what flows tell it.
    """
    try:
        descriptor = os.open(ui_file(runs_dir), os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            status = os.fstat(descriptor)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            found = json.load(file) if ours else {}
        record = UiRecord(auth=str(found["auth"]), prefect=found["prefect"], mlflow=found["mlflow"])
    except (OSError, *DAMAGED):
        return None
    return record if holder(_lease(runs_dir)) else None


def _lease(runs_dir: Path) -> Path:
    return ui_dir(runs_dir) / "lease"
