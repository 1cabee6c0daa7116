"""Copies a run to one of ``tracking.mirrors``: once, or alongside the run until it ends.

``sync`` copies new entries once; ``python -m flows.tracking.mirrors.sync RUN_DIR NAME`` follows a run. Each mirror has
a process of its own, so a slow service delays neither the run nor another mirror.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import get_args

from conf.of_run import of_run
from conf.schema import Config, MirrorName
from flows.tracking import following
from flows.tracking.mirrors.base import About, Mirror
from flows.tracking.mirrors.copier import Copier
from hlatctl.run import files
from hlatctl.run.errors import DependencyError, HlatctlError, RunBusyError, StorageError, run_main
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide

TITLES: dict[MirrorName, str] = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}


def sync(run: RunPaths, name: MirrorName) -> int:
    """Copy new journal entries of a run to a mirror; return the number of copied entries.

    Args:
        name: name of the mirror; the run's configuration need not contain it.

    Raises:
        ConfigError: the run's configuration can't be read.
        DependencyError: the mirror's package is not installed.
        RunBusyError: another process is copying this run to the mirror.
        StorageError: the mirror does not accept the entries.
    """
    session = _Session(run, of_run(run), name)
    with files.created_like(run.root):
        copied = session.copy_new()
        session.close()
    return copied


def follow(run: RunPaths, name: MirrorName, say: Callable[[str], None]) -> None:
    """Copy new entries until the run has finished, or until it has no driver and nothing is new.

    Args:
        run: the run; its flow journals ``head_started`` before it starts a follower.
        say: called when the mirror stops accepting entries, and when it accepts them again.

    Raises:
        StorageError, RunBusyError: the run has no driver, and it can't be copied now.
    """
    config = of_run(run)
    session = _Session(run, config, name)
    with files.created_like(run.root):
        following.follow(run, session.copy_new, say, title=TITLES[name], what=name, poll_s=config.tracking.poll_s)
        session.close()


class _Session:
    """A copier with the lock of its run and mirror. An error ends both; the next copy continues from the cursor."""

    def __init__(self, run: RunPaths, config: Config, name: MirrorName) -> None:
        self._run, self._config, self._name = run, config, name
        self._open = ExitStack()
        self._copier: Copier | None = None

    def copy_new(self) -> int:
        """Copy new entries; return how many.

        Raises:
            DependencyError, RunBusyError, StorageError: see :func:`sync`.
        """
        with self._ended_by_errors():
            if self._copier is None:
                self._open.enter_context(_only_copier(self._run, self._name))
                open_mirror = partial(_open, self._config, self._name)
                target = _target(self._config, self._name)
                self._copier = Copier(self._run, self._config, self._name, target, open_mirror)
            return self._copier.copy_new()

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
            lines = hide(str(error)).splitlines() or [type(error).__name__]
            raise StorageError(
                f"tracking.mirrors={self._name}: {lines[0][:300]}",
                hint="the run continues without it; `hlatctl sync` copies the rest later",
            ) from error


@contextmanager
def _only_copier(run: RunPaths, name: MirrorName) -> Iterator[None]:
    def refuse(holder: Holder) -> None:
        raise RunBusyError(
            f"run {run.run_id}: {holder} is copying it to {TITLES[name]}", hint="it copies all entries; nothing to do"
        )

    with hold(run.mirror_cursor(name).with_suffix(".lock"), refuse):
        yield


def _target(config: Config, name: MirrorName) -> str:
    tracking = config.tracking
    return f"{tracking.wandb_mode} {tracking.wandb_entity}/{tracking.experiment}" if name == "wandb" else "files"


def _open(config: Config, name: MirrorName, about: About, kept: dict[str, int], last_step: int) -> Mirror:
    try:
        if name == "wandb":
            from flows.tracking.mirrors.wandb_run import Run

            return Run(about, config.tracking, last_step)
        from flows.tracking.mirrors.tensorboard_files import EventFiles

        return EventFiles(about, kept, last_step)
    except ImportError as error:
        raise DependencyError(
            f"{TITLES[name]}: {name} can't be imported ({error})", hint=f"pip install 'hlatctl[{name}]'"
        ) from None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    # Don't close the mirror, which may wait for its service. The next copy continues from the cursor.
    os._exit(0)


def main(argv: list[str]) -> int:
    """Run ``python -m flows.tracking.mirrors.sync RUN_DIR NAME``."""
    names = get_args(MirrorName)
    if len(argv) != 2 or not RunPaths(Path(argv[0])).config.is_file() or argv[1] not in names:
        print(f"usage: python -m flows.tracking.mirrors.sync RUN_DIR {'|'.join(names)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    run, name = RunPaths(Path(argv[0]).absolute()), next(known for known in names if known == argv[1])
    follow(run, name, lambda text: print(text, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
