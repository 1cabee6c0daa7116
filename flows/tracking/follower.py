"""Starts the processes that copy a run to mirrors and send messages: a slow service delays nothing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from conf.tracking import MIRRORS, mirrors_of
from flows.runtime import programs
from flows.runtime.context import FlowContext
from hlatctl.run.paths import SweepPaths

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Follower:
    """A process that follows a run's journal.

    Args:
        late: message if it is not done in time.
    """

    process: Process
    late: str


def start(ctx: FlowContext) -> list[Follower]:
    """Start the processes that follow a run's journal: copies to mirrors, and messages to people."""
    log_dir, run_id = ctx.run.logs(0), ctx.run.run_id
    followers = []
    for name in mirrors_of(ctx.config):
        process = _started("mirrors.sync", ctx.run.root, log_dir / f"mirror-{name}.log", name)
        late = f"{MIRRORS[name].title} is not up to date yet; to copy the rest: hlatctl sync {run_id}"
        followers.append(Follower(process, late))
    if ctx.config.notify.urls and not ctx.simulation and not ctx.state.sweep:
        notifier = _started("notify.follower", ctx.run.root, log_dir / "notify.log")
        followers.append(Follower(notifier, f"messages are not sent yet; to send them: hlatctl notify {run_id}"))
    return followers


def finish(ctx: FlowContext, followers: list[Follower]) -> None:
    """Wait until everything is copied and sent, at most ``tracking.final_sync_timeout_s`` in total."""
    deadline_s = time.monotonic() + ctx.config.tracking.final_sync_timeout_s
    for follower in followers:
        if not _completes(follower.process, max(0.0, deadline_s - time.monotonic())):
            ctx.message(follower.late)


def abandon(followers: list[Follower]) -> None:
    """End the processes immediately."""
    for follower in followers:
        _end(follower.process)


def conclude_sweep(sweep: SweepPaths, config: Config, say: Callable[[str], None]) -> None:
    """Copy a sweep's numbers to the services that show sweeps, each within ``tracking.final_sync_timeout_s``.

    Args:
        config: configuration of its trials.
        say: called with a message if a copy fails.
    """
    for name in mirrors_of(config):
        log = sweep.root / f"mirror-{name}.log"
        if MIRRORS[name].shows_sweeps and not _completes(
            _started("mirrors.sync", sweep.root, log, name), config.tracking.final_sync_timeout_s
        ):
            say(f"the sweep's numbers are not in {MIRRORS[name].title}; see {log}")


def _started(module: str, folder: Path, log: Path, *argv: str) -> Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return programs.start_alongside(
            programs.python_command(f"flows.tracking.{module}", os.fspath(folder), *argv), output
        )


def _completes(process: Process, timeout_s: float) -> bool:
    """Wait for a process and return whether it succeeded in time. A timeout or Ctrl-C ends it."""
    try:
        return process.wait(timeout=timeout_s) == 0
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _end(process)
        return False


def _end(process: Process) -> None:
    process.terminate()
    process.wait()
