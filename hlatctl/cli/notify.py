"""`hlatctl notify` and `hlatctl sync`: send unsent messages, and copy missing journal entries to the mirrors.

`hlatctl sync` also marks dead flow runs in Prefect.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import RunName, RunsDir, announce, find_run, runs_folder, say, write
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, HlatctlError, RunBusyError
from hlatctl.run.journal import JournalTail, no_steps
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import list_runs
from hlatctl.units import counted

if TYPE_CHECKING:
    from conf.schema import Config


_HOW = "`hlatctl resume {run_id} 'notify.urls=[env:NAME]'` adds one; docs/howto/messages.md has examples"


def notify(
    run: RunName,
    test: Annotated[bool, typer.Option("--test", help="Send one test message to each of notify.urls.")] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Print the messages about the run so far, and send nothing.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Send a run's messages that are not sent yet.

    The driver sends messages by itself (notify.urls, notify.on). This command sends the rest of a run that has ended.
    """
    from conf.of_run import of_run
    from flows.runtime.context import is_simulated

    found = find_run(run, runs_dir)
    config = of_run(found)
    announce(found)
    if show:
        _print(found, config)
        return
    if not config.notify.urls:
        raise ConfigError("notify.urls=[]: names no service", hint=_HOW.format(run_id=found.run_id))
    if is_simulated(config) and not test:
        raise ConfigError(
            f"run {found.run_id}: is simulated, and sends no messages",
            hint=f"`hlatctl notify {found.run_id} --print` shows what a real run would send",
        )
    with files.created_like(found.root):
        problems = _test(found, config) if test else _send(found, config)
    if problems:
        raise HlatctlError("; ".join(problems), hint=f"correct it, then `hlatctl notify {found.run_id} --test`")


def _print(run: RunPaths, config: Config) -> None:
    from flows.tracking.notify.notes import note_of

    for event in JournalTail(run, wanted=no_steps).stream():
        note = note_of(event, run)
        if note and note.kind in config.notify.on:
            message = note.message(run, event["time_unix_s"])
            write(f"{message.title}\n{message.body}\n")


def _test(run: RunPaths, config: Config) -> list[str]:
    from flows.tracking.notify import services
    from flows.tracking.notify.notes import Note

    note = Note(kind="test", title="test message", key="test", happened="`hlatctl notify --test`; nothing to do")
    message = note.message(run, time.time())
    problems = []
    for entry in config.notify.urls:
        problem = services.send(entry, message)
        problems += [problem] if problem else []
        say(f"{entry}: {'failed' if problem else 'sent'}")
    return problems


def _send(run: RunPaths, config: Config) -> list[str]:
    from flows.tracking.notify.notifier import Notifier, only_notifier

    with only_notifier(run):
        notifier = Notifier(run, config)
        notifier.poll()
    say(f"{counted(notifier.sent, 'message')} sent, {notifier.waiting:,} unsent")
    return list(notifier.problems.values())


def sync(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run to copy.  [default: all runs]")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Copy to TensorBoard's event files only.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Copy to Weights & Biases only.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Copy missing entries to MLflow and the mirrors.

    Copies the entries of one run, or of all runs. Also adds to Prefect what it missed, and marks flow runs
    there as Crashed if their process has died.

    With --tensorboard or --wandb, copies to that service only, also runs that were trained without it.
    """
    runs = [find_run(run, runs_dir)] if run else list_runs(runs_folder(runs_dir))
    if not runs:
        say(f"there are no runs in {runs_folder(runs_dir)}")
    asked: dict[str, bool] = {"tensorboard": tensorboard, "wandb": wandb}
    only = [name for name, is_asked in asked.items() if is_asked]
    if only:
        _check(runs, only)
    for paths in runs:
        _copy(paths, only)
    if not only:
        from flows.tracking import prefect_stale

        prefect_stale.bring_up_to_date(runs_folder(runs_dir), say)


def _check(runs: list[RunPaths], only: list[str]) -> None:
    """Refuse a service whose package or credential is missing before anything is copied."""
    from dataclasses import replace

    from conf import tracking
    from conf.of_run import of_run

    for run in runs[:1]:
        config = of_run(run)
        tracking.check_mirrors(replace(config, tracking=replace(config.tracking, mirrors=only)))


def _copy(run: RunPaths, only: list[str]) -> None:
    from conf.of_run import of_run
    from conf.tracking import mirrors_of
    from flows.tracking.mirrors import sync

    for name in only or mirrors_of(of_run(run), with_default=True):
        try:
            write(f"{run.run_id}\t{sync.sync(run, name, partial(_say_of, run.run_id))}\t{name}")
        except RunBusyError as error:  # a separate follower, which copies everything
            say(error.message)


def _say_of(run_id: str, text: str) -> None:
    say(f"{run_id}: {text}")
