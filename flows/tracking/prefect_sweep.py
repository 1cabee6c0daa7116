"""A sweep in Prefect: a view that may fail or be slow, and never delays a sweep.

The sweep is a flow run, and each trial is a task run of it. The flow run of a trial's own process is a child of that
task run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from flows.tracking import links, prefect_api, prefect_stale
from flows.tracking.prefect_api import tolerated
from flows.tracking.prefect_flow import PARENT_ENV
from flows.tracking.prefect_stale import LOCK
from hlatctl.run.paths import SweepPaths


class PrefectView:
    """A sweep's flow run. After a failure it tries again with the next trial; its end fills in what Prefect missed.

    Args:
        say: called if Prefect fails.
        start: start a Prefect API if none is running.
    """

    def __init__(self, sweep: SweepPaths, say: Callable[[str], None], *, start: bool) -> None:
        self._sweep, self._say, self._start = sweep, say, start
        self._open = ExitStack()
        self._client: Any = None
        self._flow_run_id: Any = None
        self._is_used = False
        self._tasks: dict[int, Any] = {}
        self._trials: list[int] = []

    def begin(self) -> None:
        """Create the flow run. An API that is started for it is used by the trials' processes too."""
        with tolerated(self._lose):
            self._is_used = True
            self._is_used = prefect_api.configure(self._sweep.root.parent, self._say, start=self._start)
            if self._is_used:
                self._begin()

    def trial_environment(self, number: int, run_id: str) -> dict[str, str]:
        """Return the variables that make a trial's flow run a child of the sweep's."""
        self._trials.append(number)
        with tolerated(self._lose):
            if self._is_there():
                return {PARENT_ENV: str(self._task(number, run_id))}
        return {}

    def trial_ended(self, number: int, outcome: str) -> None:
        """Set the final state of a trial's task run."""
        with tolerated(self._lose):
            if self._client is not None and number in self._tasks:
                self._client.set_task_run_state(self._tasks[number], prefect_stale.final(outcome), force=True)

    def end(self, outcome: str) -> None:
        """Set the final state of the sweep's flow run, and copy from the journals what Prefect has missed."""
        with tolerated(self._lose):
            if self._is_there():
                self._client.set_flow_run_state(self._flow_run_id, prefect_stale.final(outcome), force=True)
                self._open.close()
        if self._is_used and prefect_api.is_up():
            if any(links.is_missed(self._sweep.trial(number)) for number in self._trials):
                links.keep_missed(self._sweep, missed=True)
            prefect_stale.fill_missed(self._sweep, self._say)

    def _is_there(self) -> bool:
        if self._client is None and self._is_used and prefect_api.is_up():
            self._begin()
        return self._client is not None

    def _begin(self) -> None:
        from prefect import flow
        from prefect.client.orchestration import get_client
        from prefect.states import Running

        def sweep() -> None:
            """Never called: trials run in separate processes."""

        client = self._open.enter_context(get_client(sync_client=True))
        if self._flow_run_id is None:
            prefect_stale.mark_crashed(self._sweep.root.parent, self._say, self._sweep.driver_lock)
            self._flow_run_id = client.create_flow_run(
                flow(name="sweep")(sweep),
                name=self._sweep.run_id,
                state=Running(),
                parameters={LOCK: os.fspath(self._sweep.driver_lock)},
            ).id
        self._client = client

    def _task(self, number: int, run_id: str) -> Any:
        from prefect import task
        from prefect.states import Running

        if number not in self._tasks:
            task_run = self._client.create_task_run(
                task(name="trial")(_nothing),
                flow_run_id=self._flow_run_id,
                dynamic_key=str(number),
                name=run_id,
                state=Running(),
            )
            self._tasks[number] = task_run.id
        return self._tasks[number]

    def _lose(self, why: str) -> None:
        self._client = None
        self._open.close()
        links.keep_missed(self._sweep, missed=True)
        self._say(f"Prefect failed ({why}); the sweep continues without it")


def _nothing() -> None:
    """Represents a trial."""
