"""Copies the journal to MLflow: one way and idempotent. Only a run's end waits for it, for a limited time.

``sync`` copies new entries once; ``python -m flows.tracking.mlflow_sync RUN_DIR`` follows a run until it ends. MLflow
is a view: it may be down or slow, and can be filled later from the journal. Nothing that a run needs is read from it.

Nothing is logged twice. ``mirror.json`` records how far each journal file has been copied; it is written after MLflow
has committed. A copier that is killed in between sends the same rows again, and MLflow drops rows with equal key, step,
time and value. Each batch also sets the tag ``hlatctl.last_step``, which replaces a lost ``mirror.json``.
``flows.tracking.mlflow_run`` handles steps that a restarted training repeats.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from conf.of_run import of_run
from conf.schema import Config
from flows.tracking import following, mlflow_client
from flows.tracking.mlflow_client import SystemMetrics
from flows.tracking.mlflow_run import MirrorRun
from hlatctl.run import files
from hlatctl.run.errors import RunBusyError, run_main
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths


def _silent(_text: str) -> None:
    return


def sync(run: RunPaths, say: Callable[[str], None] = _silent) -> int:
    """Copy new journal entries of a run to MLflow; return the number of copied events.

    Args:
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

    metrics = SystemMetrics(run, config, say)

    def copy_new() -> int:
        with _only_copier(run):
            copied = _copy_new(run, config)
        metrics.keep_measuring()
        return copied

    try:
        following.follow(run, copy_new, say, title="MLflow", what="mlflow", poll_s=config.tracking.poll_s)
    finally:
        metrics.end()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: list[str]) -> int:
    """Run ``python -m flows.tracking.mlflow_sync RUN_DIR``."""
    if len(argv) != 1 or not RunPaths(Path(argv[0])).config.is_file():
        print("usage: python -m flows.tracking.mlflow_sync RUN_DIR", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    follow(RunPaths(Path(argv[0]).absolute()), lambda text: print(text, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
