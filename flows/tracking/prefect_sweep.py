"""A sweep in Prefect: a view that may fail or be slow, and never holds up a sweep.

The sweep is a flow run, each trial a task run of it, and the flow run of the trial's own process is that one's child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flows.tracking import prefect_api, prefect_stale
from flows.tracking.prefect_api import is_prefects
from flows.tracking.prefect_flow import PARENT_ENV
from flows.tracking.prefect_stale import LOCK
from hlatctl.run.paths import SweepPaths


class PrefectView:
    """A sweep's flow run. After the first failure nothing more is told to Prefect.

    Args:
        sweep: its directory.
        say: told when Prefect does not answer.
    """

    def __init__(self, sweep: SweepPaths, say: Callable[[str], None]) -> None:
        self._sweep, self._say = sweep, say
        self._client: Any = None
        self._flow_run_id: Any = None
        self._tasks: dict[int, Any] = {}

    def begin(self) -> None:
        """Start an API if none answers, which the trials' processes use too, and tell it of the sweep."""
        try:
            prefect_api.configure(self._sweep.root.parent, self._say)
            self._begin()
        except Exception as error:
            self._lose(error)

    def trial_environment(self, number: int, run_id: str) -> dict[str, str]:
        """What a trial's process needs to be a child of the sweep's flow run."""
        if self._client is None:
            return {}
        try:
            return {PARENT_ENV: str(self._task(number, run_id))}
        except Exception as error:
            self._lose(error)
            return {}

    def trial_ended(self, number: int, outcome: str) -> None:
        """How a trial ended."""
        if self._client is None or number not in self._tasks:
            return
        try:
            self._client.set_task_run_state(self._tasks[number], _state(outcome), force=True)
        except Exception as error:
            self._lose(error)

    def end(self, outcome: str) -> None:
        """How the sweep ended."""
        if self._client is None:
            return
        try:
            self._client.set_flow_run_state(self._flow_run_id, _state(outcome), force=True)
            self._client.__exit__(None, None, None)
        except Exception as error:
            self._lose(error)

    def _begin(self) -> None:
        from prefect import flow
        from prefect.client.orchestration import get_client
        from prefect.states import Running

        def sweep() -> None:
            """Nothing runs here: trials run in processes of their own."""

        client = get_client(sync_client=True)
        client.__enter__()
        prefect_stale.mark_crashed(self._sweep.root.parent, self._say, self._sweep.driver_lock)
        made = client.create_flow_run(
            flow(name="sweep")(sweep),
            name=self._sweep.run_id,
            state=Running(),
            parameters={LOCK: os.fspath(self._sweep.driver_lock)},
        )
        self._client, self._flow_run_id = client, made.id

    def _task(self, number: int, run_id: str) -> Any:
        from prefect import task
        from prefect.states import Running

        if number not in self._tasks:
            made = self._client.create_task_run(
                task(name="trial")(_nothing),
                flow_run_id=self._flow_run_id,
                dynamic_key=str(number),
                name=run_id,
                state=Running(),
            )
            self._tasks[number] = made.id
        return self._tasks[number]

    def _lose(self, error: Exception) -> None:
        if not is_prefects(error):
            raise error
        self._client = None
        self._say(f"Prefect failed ({type(error).__name__}: {error}); the sweep goes on without it")


def _nothing() -> None:
    """Stands for a trial."""


def _state(outcome: str) -> Any:
    from prefect.states import Cancelled, Completed, Failed

    if outcome == "failed":
        return Failed()
    return Cancelled(message=outcome) if outcome == "stopped" else Completed(name=outcome.capitalize())
