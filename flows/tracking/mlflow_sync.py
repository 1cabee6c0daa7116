"""Copying the journal to MLflow: one way and idempotent. A run never waits for it.

``sync`` copies new entries once; ``python -m flows.tracking.mlflow_sync RUN_DIR`` follows a run until it ends. MLflow
is a view: it may be down or slow, and can be filled later from the journal. Nothing that a run needs is read from it.

Nothing is logged twice. ``mirror.json`` says how far each journal file has been copied; it is written after MLflow has
committed. A copier that is killed in between sends the same rows again, and MLflow drops rows with equal key, step,
time and value. Each batch also sets the tag ``hlatctl.last_step``, which replaces a lost ``mirror.json``.
``flows.tracking.mlflow_rewind`` handles steps that a restarted training repeats.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from conf.of_run import of_run
from conf.schema import Config
from flows.tracking import mlflow_client
from flows.tracking.mlflow_run import MirrorRun
from hlatctl.run import files
from hlatctl.run.errors import RunBusyError, StorageError, run_main
from hlatctl.run.journal import MIRROR_WRITER, JournalTail, JournalWriter, no_steps
from hlatctl.run.lease import Holder, driver_pid, hold
from hlatctl.run.paths import RunPaths

_MAX_BACKOFF_POLLS = 8
_LOOK_S = 0.25


def _silent(_text: str) -> None:
    return


def sync(run: RunPaths, say: Callable[[str], None] = _silent) -> int:
    """Copy new journal entries of a run to MLflow; returns the number of events copied.

    Args:
        run: the run.
        say: called with the progress of a long copy.

    Raises:
        ConfigError: the run's configuration can't be read.
        DependencyError: MLflow is not installed.
        RunBusyError: another process is copying this run.
        StorageError: MLflow doesn't answer, or rejects a request.
    """
    config = of_run(run)
    with files.created_like(run.root), _only_copier(run):
        return _copy_new(run, config, say)


def _copy_new(run: RunPaths, config: Config, say: Callable[[str], None] = _silent) -> int:
    with mlflow_client.connection(config.tracking, run.root.parent) as (client, uri):
        return MirrorRun(run, config, client, uri).copy_new(say)


@contextmanager
def _only_copier(run: RunPaths) -> Iterator[None]:
    def refuse(holder: Holder) -> None:
        raise RunBusyError(
            f"run {run.run_id}: {holder} is copying it to MLflow", hint="it copies all entries; nothing to do"
        )

    with hold(run.mirror.with_suffix(".lock"), refuse):
        yield


def follow(run: RunPaths, say: Callable[[str], None]) -> None:
    """Copy new entries until the run has finished, or until it has no driver and nothing is new.

    Args:
        run: the run; its flow journals ``head_started`` before it starts a follower.
        say: called when MLflow stops answering, and when it answers again.

    Raises:
        StorageError, RunBusyError: the run has no driver, and it can't be copied now.
    """
    config = of_run(run)
    watch, failures, lost = _Watch(run), 0, False
    while True:
        # Checked before the copy, so that the copy includes everything written before the end.
        driven, ended = driver_pid(run) is not None, watch.ended()
        try:
            with _only_copier(run):
                copied = _copy_new(run, config)
        except (StorageError, RunBusyError) as error:
            if not driven:
                raise
            if failures == 0:
                say(str(error))
            if isinstance(error, StorageError) and not lost:
                lost = True
                _journal(run, "tracking_lost", what="mlflow", message=f"{error.message}; the run continues")
            failures += 1
        else:
            if failures:
                say("MLflow is up to date again")
            if lost:
                lost = False
                _journal(run, "tracking_back", what="mlflow", events=copied)
            failures = 0
            if ended or (not driven and not copied):
                return
        polls = min(2**failures, _MAX_BACKOFF_POLLS)
        watch.wait(polls * config.tracking.poll_s, until_ended=not failures)


def _journal(run: RunPaths, kind: str, **fields: Any) -> None:
    """Append an event, unless the disk is full or another follower holds the journal file."""
    with suppress(RunBusyError, StorageError), JournalWriter(run, MIRROR_WRITER) as journal:
        journal.append(kind, **fields)


class _Watch:
    """Reads a run's journal until its end."""

    def __init__(self, run: RunPaths) -> None:
        self._tail = JournalTail(run, wanted=no_steps)
        self._ended = False

    def ended(self) -> bool:
        """Whether the newest driver has written ``run_finished``."""
        for event in self._tail.stream():
            if event["kind"] in ("head_started", "run_finished"):
                self._ended = event["kind"] == "run_finished"
        return self._ended

    def wait(self, seconds: float, *, until_ended: bool) -> None:
        """Sleep; with ``until_ended`` at most until the run ends."""
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
