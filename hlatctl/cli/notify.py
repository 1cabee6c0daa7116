"""`hlatctl notify`: sends a run's unsent messages, a test message, or prints the messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import RunName, RunsDir, announce, find_run, say, write
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, HlatctlError
from hlatctl.run.journal import JournalTail, no_steps
from hlatctl.run.paths import RunPaths
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

    found = find_run(run, runs_dir)
    config = of_run(found)
    announce(found)
    if show:
        _print(found, config)
        return
    if not config.notify.urls:
        raise ConfigError("notify.urls=[]: names no service", hint=_HOW.format(run_id=found.run_id))
    if config.cluster.launcher == "mock" and not test:
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
    """Send a test message to each service; return what failed."""
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
    """Send what is unsent; return what failed."""
    from flows.tracking.notify.notifier import Notifier, only_notifier

    with only_notifier(run):
        notifier = Notifier(run, config)
        notifier.poll()
    say(f"{counted(notifier.sent, 'message')} sent, {notifier.waiting:,} unsent")
    return list(notifier.problems.values())
