"""``<runs_dir>/.ui.json``: addresses and password of a running `hlatctl ui`, readable only by its user."""

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
from hlatctl.run.files import DAMAGED
from hlatctl.run.lease import Holder, hold, holder


@dataclass(frozen=True, kw_only=True)
class UiRecord:
    """The two servers of `hlatctl ui`.

    Args:
        auth: ``USER:PASSWORD`` for both servers.
        prefect, mlflow: addresses of the servers; None: not started.
    """

    auth: str
    prefect: str | None = None
    mlflow: str | None = None


def ui_file(runs_dir: Path) -> Path:
    """Return the path of the record."""
    return runs_dir / ".ui.json"


def ui_dir(runs_dir: Path) -> Path:
    """Return the folder of the servers' logs."""
    return runs_dir / ".ui"


@contextmanager
def only_ui(runs_dir: Path) -> Iterator[None]:
    """Hold the lease of the only `hlatctl ui` of a runs folder.

    Raises:
        RunBusyError: another `hlatctl ui` is running.
        StorageError: the folder can't be written.
    """

    def refuse(other: Holder) -> None:
        raise RunBusyError(f"runs_dir={runs_dir}: {other} is serving it", hint=f"kill {other.pid} ends that one")

    with hold(_lease(runs_dir), refuse):
        yield


def write(runs_dir: Path, record: UiRecord) -> None:
    """Write the record. The caller must be the ``only_ui``, and removes the record at the end."""
    files.write_json(ui_file(runs_dir), {"v": 2, "pid": os.getpid(), **asdict(record)}, private=True)


def read(runs_dir: Path) -> UiRecord | None:
    """Return the record of this user's running `hlatctl ui`; None if there is none.

    A file that belongs to another user, or that others can read or write, is ignored: it could name a server that
    collects what flows report.
    """
    try:
        descriptor = os.open(ui_file(runs_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            status = os.fstat(descriptor)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            fields = json.load(file) if ours else {}
        record = UiRecord(auth=str(fields["auth"]), prefect=fields["prefect"], mlflow=fields["mlflow"])
    except (OSError, *DAMAGED):
        return None
    return record if holder(_lease(runs_dir)) else None


def _lease(runs_dir: Path) -> Path:
    return ui_dir(runs_dir) / "lease"
