"""A sweep in Prefect: a view that may fail or be slow, and never delays a sweep.

The sweep is a flow run, and each trial is a task run of it. The flow run of a trial's own process is a child of that
task run. A thread reports to Prefect, in order. The id of a task run is chosen before the task run is created, so a
trial's process starts without waiting for Prefect, and waits for its parent in a thread of its own (``prefect_flow``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from queue import Queue
from typing import Any
from uuid import UUID, uuid4

from flows.tracking import links, prefect_api, prefect_stale
from flows.tracking.prefect_api import PARENT_ENV, tolerated
from flows.tracking.prefect_stale import LOCK
from hlatctl.run.paths import SweepPaths


class PrefectView:
    """A sweep's flow run. After a failure it tries again with the next report; its end fills in what Prefect missed.

    Args:
        say: called if Prefect fails.
        start: start a Prefect API if none is running.
    """

    def __init__(self, sweep: SweepPaths, say: Callable[[str], None], *, start: bool) -> None:
        self._sweep, self._say, self._start = sweep, say, start
        self._is_used, self._is_over = False, False
        #: The ids of the trials' task runs, chosen here, and the names of their runs.
        self._tasks: dict[int, tuple[UUID, str]] = {}
        self._reports: Queue[Callable[[], None]] = Queue()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="prefect")
        # Of the thread:
        self._open = ExitStack()
        self._client: Any = None
        self._flow_run_id: Any = None
        self._created: set[int] = set()

    def begin(self) -> None:
        """Start to report. An API that is started for it is used by the trials' processes too."""
        # Here, because the trials' processes get its address.
        with tolerated(self._lose):
            self._is_used = prefect_api.begin(self._sweep.root.parent, self._say, start=self._start)
        if self._is_used:
            self._reports.put(lambda: None)
            self._thread.start()

    def trial_environment(self, number: int, run_id: str) -> dict[str, str]:
        """Return the variables that make a trial's flow run a child of the sweep's."""
        if not self._is_used:
            return {}
        if number not in self._tasks:
            self._tasks[number] = uuid4(), run_id
        self._reports.put(lambda: None)
        return {PARENT_ENV: str(self._tasks[number][0])}

    def trial_ended(self, number: int, outcome: str) -> None:
        """Set the final state of a trial's task run."""
        if number in self._tasks:
            self._reports.put(partial(self._end_task, number, outcome))

    def end(self, outcome: str, timeout_s: float) -> None:
        """Set the final state of the sweep's flow run, and copy from the journals what Prefect has missed.

        What Prefect hasn't got after a time is copied later, by `hlatctl sync` for example.
        """
        if not self._is_used:
            return
        self._reports.put(partial(self._end, outcome))
        self._thread.join(timeout_s)
        self._is_over = True
        if self._thread.is_alive():
            links.keep_missed(self._sweep, missed=True)
        elif prefect_api.is_up():
            if any(links.is_missed(self._sweep.trial(number)) for number in self._tasks):
                links.keep_missed(self._sweep, missed=True)
            prefect_stale.fill_missed(self._sweep, self._say)

    def _follow(self) -> None:
        """Wait for the API, and make the reports in their order."""
        try:
            prefect_api.connect()
            is_last = False
            while not (is_last or self._is_over):
                report = self._reports.get()
                is_last = isinstance(report, partial) and report.func == self._end
                with tolerated(self._lose):
                    if self._is_there():
                        self._add_tasks()
                        report()
                self._reports.task_done()
        except Exception as error:  # a view: whatever happens to it, the sweep continues
            self._lose(f"{type(error).__name__}: {error}")

    def _is_there(self) -> bool:
        if self._client is None and prefect_api.is_up():
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

    def _add_tasks(self) -> None:
        """Create the task runs of trials that have started since, or while Prefect was away."""
        from prefect import task
        from prefect.states import Running

        for number, (task_run_id, run_id) in list(self._tasks.items()):
            if number not in self._created:
                self._client.create_task_run(
                    task(name="trial")(_nothing),
                    flow_run_id=self._flow_run_id,
                    dynamic_key=str(number),
                    id=task_run_id,
                    name=run_id,
                    state=Running(),
                )
                self._created.add(number)

    def _end_task(self, number: int, outcome: str) -> None:
        self._client.set_task_run_state(self._tasks[number][0], prefect_stale.final(outcome), force=True)

    def _end(self, outcome: str) -> None:
        self._client.set_flow_run_state(self._flow_run_id, prefect_stale.final(outcome), force=True)
        self._open.close()

    def _lose(self, why: str) -> None:
        self._client = None
        self._open.close()
        links.keep_missed(self._sweep, missed=True)
        if not self._is_over:
            self._say(f"Prefect failed ({why}); the sweep continues without it")


def _nothing() -> None:
    """Represents a trial."""
