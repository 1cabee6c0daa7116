"""Handlers of ``hlatctl.run.fold`` for the events of a scheduler's queue."""

from __future__ import annotations

from hlatctl.run.journal import Event
from hlatctl.run.state import NO_SPARE_NODE, TRAIN_JOB, QueuedJob, RunState


def job_queued(state: RunState, event: Event) -> None:
    """The job waits; an earlier time of the same wait is kept."""
    name, reason = str(event["job"]), str(event.get("reason") or "")
    since_unix_s = state.queued[name].since_unix_s if name in state.queued else float(event["time_unix_s"])
    start = event.get("expected_start_unix_s")
    start_unix_s, needs_person = None if start is None else float(start), event.get("code") == NO_SPARE_NODE
    state.queued[name] = QueuedJob(reason, since_unix_s, start_unix_s, needs_person)


def job_started(state: RunState, event: Event) -> None:
    """The job runs on its hosts."""
    job_left_queue(state, event)
    newest = state.attempt
    if event["job"] == TRAIN_JOB and newest and newest.number == event["attempt"]:
        newest.hosts = [str(host) for host in event.get("hosts") or []]


def job_left_queue(state: RunState, event: Event) -> None:
    """The job no longer waits."""
    state.queued.pop(str(event["job"]), None)


def only_training_waits(state: RunState) -> None:
    """Forget the jobs of stages, which end with their driver."""
    state.queued = {name: job for name, job in state.queued.items() if name == TRAIN_JOB}


def training_left(state: RunState) -> None:
    """Training's job no longer waits: its attempt has ended."""
    state.queued.pop(TRAIN_JOB, None)
