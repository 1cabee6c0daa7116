"""Requests to stop a run or a sweep: who writes them, and which driver they are for.

A driver holds its lock for a while before it journals ``head_started``, and can be asked to stop in between. So each
request names its driver by the token of the lease. A driver that starts obeys a request that names it. It ignores
others, which earlier drivers have obeyed. The driver of a dry run has no token and obeys every request.
"""

from __future__ import annotations

from typing import Protocol

from hlatctl.run.journal import Event, JournalWriter
from hlatctl.run.lease import driver_token
from hlatctl.run.paths import RunPaths

#: ``by`` of a request that the driver makes because the run's budget is used up.
BUDGET = "budget"


class Driven(Protocol):
    """The part of a folded state with the driver and the request to stop."""

    driver: str
    asked_driver: str
    stop_requested: bool
    stop_by: str


def request(run: RunPaths, journal: JournalWriter, *, by: str) -> None:
    """Journal a request to stop.

    If another driver starts meanwhile, it gets a separate request.

    Args:
        journal: the requester's journal.

    Raises:
        StorageError: the request can't be written, so the driver can't read it.
    """
    asked: str | None = None
    while (token := driver_token(run)) != asked and (token or asked is None):
        journal.append("stop_requested", durable=True, by=by, driver=token)
        asked = token


def fold_start(state: Driven, event: Event) -> None:
    """Apply ``head_started``."""
    state.driver = str(event.get("token", ""))
    state.stop_requested = state.driver != "" and state.asked_driver == state.driver


def fold_request(state: Driven, event: Event) -> None:
    """Apply ``stop_requested``. Without a driver, the request is for the job that is still running."""
    state.asked_driver, state.stop_by = str(event.get("driver", "")), str(event.get("by") or "")
    state.stop_requested |= not state.driver or state.asked_driver in ("", state.driver)
