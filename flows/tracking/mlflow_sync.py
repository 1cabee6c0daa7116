"""The journal copied to MLflow: one way, idempotent, and never in the way of a run.

``sync`` copies what is new once; ``python -m flows.tracking.mlflow_sync RUN_DIR`` follows a run until it ends. MLflow
is a view: it may be down, slow, or be filled later from the journal, which alone is the truth. Nothing here reads
from MLflow what a run needs.

Why nothing is logged twice: ``mirror.json`` holds how far each journal file has been copied. It is written after
MLflow has committed, so a copier that is killed in between sends the same rows again, and MLflow drops rows that are
equal in key, step, time and value. Each batch also carries the last step in the tag ``hlatctl.last_step``, which
replaces a lost ``mirror.json``. Steps that a restarted training repeats are superseded in MLflow too: see
``flows.tracking.mlflow_rewind``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from conf.load import load
from conf.schema import Config
from flows.tracking import ui_record
from flows.tracking.mlflow_run import MirrorRun
from hlatctl.run import files
from hlatctl.run.errors import DependencyError, HlatctlError, RunBusyError, StorageError, cannot_write, run_main
from hlatctl.run.journal import MIRROR_WRITER, JournalTail, JournalWriter
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths, mlflow_artifacts, mlflow_database
from hlatctl.run.redact import hide

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_SQLITE = "sqlite:///"
_MAX_BACKOFF_POLLS = 8
_LOOK_S = 0.25

#: A server that does not answer must not hold anyone up: MLflow's own defaults add up to many minutes.
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def default_tracking_uri(runs_dir: Path) -> str:
    """MLflow's address where none is configured: a database in the runs folder."""
    return f"{_SQLITE}{mlflow_database(runs_dir.absolute())}"


def artifacts_dir(runs_dir: Path) -> Path:
    """Where artifacts go when the tracking address is a database and no server."""
    return mlflow_artifacts(runs_dir.absolute())


def sync(run: RunPaths) -> int:
    """Copy what is new in a run's journal to MLflow; the number of events copied.

    Raises:
        ConfigError: the run's configuration can't be read.
        DependencyError: MLflow is not installed.
        RunBusyError: another process copies this run now.
        StorageError: MLflow can't be reached, or refuses.
    """
    config = load(run.config)
    with files.created_like(run.root), _only_copier(run):
        return copy_new(run, config)


def copy_new(run: RunPaths, config: Config) -> int:
    """``sync`` for whoever holds the lock already."""
    uri = config.tracking.mlflow_uri or default_tracking_uri(run.root.parent)
    with as_storage_error(uri):
        database = Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None
        artifacts = artifacts_dir(run.root.parent).as_uri() if database else None
        return MirrorRun(run, config, connect(uri, run.root.parent), uri, artifacts, database).copy_new()


def connect(uri: str, runs_dir: Path | None = None) -> MlflowClient:
    """An MLflow client whose requests end soon when nothing answers, and that has the password of our own server."""
    for name, value in _MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ui = ui_record.read(runs_dir) if runs_dir else None
    if ui and ui.mlflow == uri.rstrip("/"):
        # A new one at each start of the server; a client reads them for each request.
        os.environ["MLFLOW_TRACKING_USERNAME"], _, os.environ["MLFLOW_TRACKING_PASSWORD"] = ui.auth.partition(":")
    if uri.startswith(_SQLITE):
        _check_sqlite(Path(uri.removeprefix(_SQLITE)))
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise DependencyError(
            f"tracking.enabled=true: mlflow can't be imported ({error})",
            hint="pip install 'hlatctl[head]', or tracking.enabled=false",
        ) from None
    return MlflowClient(tracking_uri=uri)


def _check_sqlite(path: Path) -> None:
    # MLflow would try for an hour to open a file that can't be opened.
    try:
        connection = sqlite3.connect(path, timeout=10)
        try:
            connection.execute("PRAGMA schema_version").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StorageError(
            f"tracking.mlflow_uri={_SQLITE}{path}: can't be opened ({error})",
            hint="choose another with tracking.mlflow_uri=, or tracking.enabled=false",
        ) from None


@contextmanager
def as_storage_error(uri: str) -> Iterator[None]:
    """MLflow's many ways to fail, as one that a person can act on, without credentials."""
    try:
        yield
    except HlatctlError:
        raise
    except Exception as error:
        # Connection errors come as MlflowException, SQLAlchemyError, requests' and OSError: what they share is that
        # the copy is incomplete, that the run does not mind, and that trying again is safe.
        lines = hide(str(error)).splitlines() or [type(error).__name__]
        raise StorageError(
            f"tracking.mlflow_uri={hide(uri)}: {lines[0][:300]}",
            hint="the run goes on without MLflow; `hlatctl sync` copies the rest later",
        ) from error


@contextmanager
def _only_copier(run: RunPaths) -> Iterator[None]:
    path = run.mirror.with_suffix(".lock")
    try:
        file = path.open("a")
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(
                f"run {run.run_id}: another process is copying it to MLflow", hint="it will bring everything"
            ) from None
        yield


def follow(run: RunPaths, say: Callable[[str], None]) -> None:
    """Copy what appears until the run has finished, or until nobody drives it and nothing is new.

    Args:
        run: the run; the flow has journalled ``head_started`` before it starts a follower.
        say: told when MLflow stops answering and when it is back, and nothing in between.

    Raises:
        StorageError, RunBusyError: nobody drives the run, and it can't be copied now.
    """
    config = load(run.config)
    watch, failures, lost = _Watch(run), 0, False
    while True:
        # Looked at before the copy, so that whatever was written before the end is part of it.
        driven, ended = driver_pid(run) is not None, watch.ended()
        try:
            with _only_copier(run):
                copied = copy_new(run, config)
        except (StorageError, RunBusyError) as error:
            if not driven:
                raise
            if failures == 0:
                say(str(error))
            if isinstance(error, StorageError) and not lost:
                lost = True
                _journal(run, "tracking_lost", what="mlflow", message=f"{error.message}; the run goes on")
            failures += 1
        else:
            if failures:
                say("MLflow has got everything up to now")
            if lost:
                lost = False
                _journal(run, "tracking_back", what="mlflow", events=copied)
            failures = 0
            if ended or (not driven and not copied):
                return
        polls = min(2**failures, _MAX_BACKOFF_POLLS)
        watch.wait(polls * config.tracking.poll_s, until_ended=not failures)


def _journal(run: RunPaths, kind: str, **fields: Any) -> None:
    """Append an event of the follower's own, unless the disk is full or another follower holds the file."""
    with suppress(RunBusyError, StorageError), JournalWriter(run, MIRROR_WRITER) as journal:
        journal.append(kind, **fields)


class _Watch:
    """Whether a run has ended, by what is new in its journal."""

    def __init__(self, run: RunPaths) -> None:
        self._tail = JournalTail(run)
        self._ended = False

    def ended(self) -> bool:
        """Whether its last head has written ``run_finished``."""
        for event in self._tail.read_new():
            if event["kind"] in ("head_started", "run_finished"):
                self._ended = event["kind"] == "run_finished"
        return self._ended

    def wait(self, seconds: float, *, until_ended: bool) -> None:
        """Sleep, at most until the end of the run: a finished run should not wait for the next poll."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0 and not (until_ended and self.ended()):
            time.sleep(min(left_s, _LOOK_S))


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: list[str]) -> int:
    """``python -m flows.tracking.mlflow_sync RUN_DIR``."""
    if len(argv) != 1 or not RunPaths(Path(argv[0])).config.is_file():
        print("usage: python -m flows.tracking.mlflow_sync RUN_DIR", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    follow(RunPaths(Path(argv[0]).absolute()), lambda text: print(text, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
