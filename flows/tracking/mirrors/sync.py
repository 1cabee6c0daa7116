"""Copies a run to one mirror: once, or alongside the run until it ends.

``sync`` copies new entries once; ``python -m flows.tracking.mirrors.sync RUN_DIR NAME`` follows a run. Each mirror has
a process of its own, so a slow service delays neither the run nor another mirror. Only a run's end waits for them, and
not for long. For a sweep's directory, the same command copies the sweep's status and numbers, and ends.

A mirror is a view: its service may be down or slow, and is filled later from the journal. Nothing that a run needs is
read from it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from conf.of_run import of_run
from conf.schema import Config
from conf.tracking import MIRRORS, mirrors_of
from flows.tracking import mlflow_client
from flows.tracking.mirrors.base import Service
from flows.tracking.mirrors.copier import Copier
from hlatctl.run import files
from hlatctl.run.errors import DependencyError, HlatctlError, RunBusyError, StorageError, install, run_main
from hlatctl.run.journal import MIRROR_WRITER, JournalTail, JournalWriter, no_steps, read_events
from hlatctl.run.lease import Holder, driver_pid, hold
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.sweep import fold

_MAX_BACKOFF_POLLS = 8
_LOOK_S = 0.25


def service_of(run: RunPaths, config: Config, name: str) -> Service:
    """Return the service of a mirror for a run or a sweep.

    Raises:
        ConfigError: no mirror has the name.
        DependencyError: the service's package is not installed.
    """
    try:
        service: Service = MIRRORS.create(name, run, config)
    except ImportError as error:
        raise DependencyError(
            f"{MIRRORS[name].title}: {name} can't be imported ({error})", hint=install(name)
        ) from None
    return service


def sync(run: RunPaths, name: str, say: Callable[[str], None] = lambda _: None) -> int:
    """Copy new journal entries of a run to a mirror; return the number of copied entries.

    Args:
        name: name of the mirror; the run's configuration need not contain it.
        say: called with the progress of a long copy.

    Raises:
        ConfigError: the run's configuration can't be read.
        DependencyError: the mirror's package is not installed.
        RunBusyError: another process is copying this run to the mirror.
        StorageError: the mirror does not accept the entries.
    """
    session = Session(run, of_run(run), name, say)
    with files.created_like(run.root):
        copied = session.copy_new(even_if_nothing_is_new=not session.service.lasting)
        session.close()
    return copied


def register(run: RunPaths, folder: Path, written: Mapping[str, Any]) -> list[str]:
    """Register an exported model wherever the run is copied to and models can be registered.

    Args:
        run: the run that trained it; it is copied first.
        folder: the export.
        written: ``step``, ``dtype`` and ``parameters`` of the export.

    Returns:
        Service, name and version of each, such as ``MLflow as hlat-7b version 3``.

    Raises:
        RunBusyError, StorageError: see :func:`sync`.
    """
    config, registered = of_run(run), []
    for name in mirrors_of(config, with_default=True):
        service = service_of(run, config, name)
        if service.registers_models:
            sync(run, name)
            registered.append(f"{MIRRORS[name].title} as {service.register(folder, written)}")
    return registered


def copy_sweep(sweep: SweepPaths, name: str) -> None:
    """Copy a sweep's status and numbers to a service that shows sweeps; idempotent.

    Raises:
        DependencyError: the service's package is not installed.
        StorageError: the service does not accept them.
    """
    for trial in fold(read_events(sweep)).trials.values():
        service_of(sweep, of_run(sweep.trial(trial.number)), name).copy_sweep()
        return


class Session:
    """A copier with the lock of its run and mirror. An error ends both; the next copy continues from the cursor."""

    def __init__(self, run: RunPaths, config: Config, name: str, say: Callable[[str], None] = lambda _: None) -> None:
        self._run, self._config, self._name, self._say = run, config, name, say
        self.service = service_of(run, config, name)
        self._open = ExitStack()
        self._copier: Copier | None = None

    def copy_new(self, *, even_if_nothing_is_new: bool = False) -> int:
        """Copy new entries; return how many. See ``Copier.copy_new``.

        Raises:
            DependencyError, RunBusyError, StorageError: see :func:`sync`.
        """
        with self._ended_by_errors():
            if self._copier is None:
                self._open.enter_context(only_copier(self._run, self._name))
                self._copier = Copier(self._run, self._config, self._name, self.service, self._say)
            copied = self._copier.copy_new(even_if_nothing_is_new=even_if_nothing_is_new)
        if not self.service.lasting:
            self.close()
        return copied

    def close(self) -> None:
        """Finish the copy.

        Raises:
            StorageError: the mirror didn't accept everything.
        """
        with self._ended_by_errors():
            copier, self._copier = self._copier, None
            if copier:
                copier.close()
        self._open.close()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            copier, self._copier = self._copier, None
            with self._open, suppress(Exception):
                if copier:
                    copier.abandon()
            if isinstance(error, HlatctlError):
                raise
            # Errors of the service's library and OSError: the copy is incomplete, and a retry is safe.
            setting = self.service.setting or f"tracking.mirrors={self._name}"
            raise mlflow_client.not_accepted(setting, MIRRORS[self._name].title, error) from error


@contextmanager
def only_copier(run: RunPaths, name: str) -> Iterator[None]:
    """Hold the lock of a run and a mirror.

    Raises:
        RunBusyError: another process is copying this run to the mirror.
    """

    def refuse(holder: Holder) -> None:
        raise RunBusyError(
            f"run {run.run_id}: {holder} is copying it to {MIRRORS[name].title}",
            hint="it copies all entries; nothing to do",
        )

    with hold(run.mirror_cursor(name).with_suffix(".lock"), refuse):
        yield


def follow(run: RunPaths, name: str, say: Callable[[str], None]) -> None:
    """Copy new entries until the run has finished, or until it has no driver and nothing is new.

    A service that doesn't answer is tried again, at longer and longer intervals.

    Args:
        run: the run; its flow journals ``head_started`` before it starts a follower.
        say: called when the mirror stops accepting entries, and when it accepts them again.

    Raises:
        StorageError, RunBusyError: the run has no driver, and it can't be copied now.
    """
    config = of_run(run)
    session, watch, failures, lost = Session(run, config, name), _Watch(run), 0, False
    with files.created_like(run.root), session.service.beside(say) as after_copy:
        while True:
            # Checked before the copy, so that the copy includes everything written before the end.
            driven, ended = driver_pid(run) is not None, watch.ended()
            try:
                copied = session.copy_new()
                after_copy()
            except (StorageError, RunBusyError) as error:
                if not driven:
                    raise
                if failures == 0:
                    say(str(error))
                if isinstance(error, StorageError) and not lost:
                    lost = True
                    _journal(run, "tracking_lost", what=name, message=f"{error.message}; the run continues")
                failures += 1
            else:
                if failures:
                    say(f"{MIRRORS[name].title} is up to date again")
                if lost:
                    lost = False
                    _journal(run, "tracking_back", what=name, events=copied)
                failures = 0
                if ended or (not driven and not copied):
                    break
            polls = min(2**failures, _MAX_BACKOFF_POLLS)
            watch.wait(polls * config.tracking.poll_s, until_ended=not failures)
        session.close()


def _journal(run: RunPaths, kind: str, *, what: str, **fields: Any) -> None:
    """Append an event to the mirror's own file, unless the disk is full or another follower holds the file."""
    with suppress(RunBusyError, StorageError), JournalWriter(run, f"{MIRROR_WRITER}-{what}") as journal:
        journal.append(kind, what=what, **fields)


class _Watch:
    def __init__(self, run: RunPaths) -> None:
        self._tail = JournalTail(run, wanted=no_steps)
        self._ended = False

    def ended(self) -> bool:
        """Return whether the newest driver has written ``run_finished``."""
        for event in self._tail.stream():
            if event["kind"] in ("head_started", "run_finished"):
                self._ended = event["kind"] == "run_finished"
        return self._ended

    def wait(self, seconds: float, *, until_ended: bool) -> None:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0 and not (until_ended and self.ended()):
            time.sleep(min(left_s, _LOOK_S))


def _stop(_signal: int, _frame: FrameType | None) -> None:
    # Don't close the mirror, which may wait for its service. The next copy continues from the cursor.
    os._exit(0)


def main(argv: list[str]) -> int:
    """Run ``python -m flows.tracking.mirrors.sync RUN_DIR|SWEEP_DIR NAME``."""
    if len(argv) != 2 or argv[1] not in MIRRORS or not Path(argv[0]).is_dir():
        print(f"usage: python -m flows.tracking.mirrors.sync RUN_DIR|SWEEP_DIR {'|'.join(MIRRORS)}", file=sys.stderr)
        return 2
    folder, name = Path(argv[0]).absolute(), argv[1]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    if (sweep := SweepPaths(folder)).space.is_file():
        copy_sweep(sweep, name)
    else:
        follow(RunPaths(folder), name, lambda text: print(text, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
