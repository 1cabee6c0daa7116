"""A run or an evaluation as a Prefect flow run: a view, which a thread of its own fills. Nothing waits for it.

Every stage is a task run with the times at which it began and ended. A stage runs whether Prefect answers or not: what
Prefect has not accepted is sent again until it does, or is copied from the journal later (``prefect_stale``).

Cancelling or suspending a flow run in Prefect stops its run as `hlatctl stop` does. Prefect only marks the flow run as
Cancelling or Suspended. The thread queries the state every few seconds, which is one request to Prefect's server and
none to the training processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from conf.schema import Config
from flows.runtime.context import FlowContext
from flows.tracking import links, prefect_api, prefect_stale, ui_record
from flows.tracking.prefect_stale import PRETRAIN, Task
from hlatctl.run.errors import HlatctlError, RunBusyError, StoppedError, StorageError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from hlatctl.run.stopping import request

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


#: The requester of the stop, in the journal.
BY = "a person in Prefect"
_POLL_S = 3.0
_PROGRESS_EVERY_S = 10.0
#: The id of the task run that represents this process's run in a sweep's flow run.
PARENT_ENV = "HLATCTL_PREFECT_PARENT"


def _is_stopped(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    """Return whether the flow run is cancelled or suspended.

    A flow run that stays Suspended becomes Failed after some minutes, and can't be Cancelled at its end. So it is set
    to Cancelling from now on.
    """
    from prefect.states import Cancelling

    state = client.read_flow_run(flow_run_id).state
    if state is not None and state.is_paused():
        client.set_flow_run_state(flow_run_id, Cancelling(message="suspended: the run stops"), force=True)
    return state is not None and (state.is_cancelling() or state.is_cancelled() or state.is_paused())


def _request_stop(run: RunPaths) -> bool:
    """Return whether the request is in the journal; False while another process writes it, or on a full disk."""
    with suppress(RunBusyError, StorageError), JournalWriter(run, OPERATOR_WRITER) as journal:
        request(run, journal, by=BY)
        return True
    return False


class PrefectView:
    """A flow run, and the caller of its stages. It is also an observer that passes progress on.

    Args:
        name: the flow; only a ``PRETRAIN`` flow run can be cancelled, and continues that of the run's earlier drivers.
    """

    def __init__(self, ctx: FlowContext, name: str = PRETRAIN) -> None:
        self._ctx, self._name = ctx, name
        self._inner = ctx.observer
        #: What Prefect has not accepted yet. Other threads only append, and the view's thread removes from the front.
        self._tasks: list[Task] = []
        self._lines: list[dict[str, Any]] = []
        self._artifacts: list[dict[str, Any]] = []
        self._percent, self._shown_percent, self._shown_s = 0.0, 0.0, 0.0
        self._progress_id: Any = None
        self._end: tuple[str, str] | None = None
        self._flow_run_id: Any = None
        self._stops, self._is_lost, self._was_missed = name == PRETRAIN, False, links.is_missed(ctx.run)
        self._wake, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="prefect")

    def start(self) -> bool:
        """Start to report; return False if there is no Prefect for this run."""
        # An API that the user names may answer late, so the thread asks it.
        if not prefect_api.is_named() and not self._begin():
            return False
        self._ctx.observer = self
        self._ctx.message_sinks.append(self._log)
        self._thread.start()
        return True

    def __enter__(self) -> PrefectView:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self._ctx.observer = self._inner
        self._ctx.message_sinks.remove(self._log)
        if not isinstance(error, SystemExit):  # SIGTERM: training continues, and so will the flow run
            self._conclude(error)

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Run a stage and report when it began and how it ended."""
        task = Task(name, time.time())
        self._add(task)
        try:
            result = stage()
        except BaseException as error:
            self._add(task.ended(*_outcome_of(error)))
            raise
        self._add(task.ended("finished"))
        return result

    def submit(self, choose: Callable[[], tuple[str, Callable[[], Any]]], *, most: int) -> Future[Any]:
        """Queue a stage that a worker thread chooses."""
        return self._ctx.clock.beside(lambda: self.call(*choose()), most=most)

    def update(self, state: RunState, config: Config) -> None:
        """Update the wrapped observer, and Prefect every few seconds."""
        self._inner.update(state, config)
        self._percent = 100.0 * state.step / config.total_steps

    def message(self, text: str) -> None:
        """Pass a message on to the wrapped observer."""
        self._inner.message(text)

    def _conclude(self, error: BaseException | None) -> None:
        from hlatctl.report.summary import summary_markdown

        ctx, run_id = self._ctx, self._ctx.run.run_id
        summary = summary_markdown(ctx.run, ctx.config)
        self._artifacts.append({"key": "summary", "type": "markdown", "description": run_id, "data": summary})
        ui = ui_record.read(Path(ctx.config.runs_dir))
        if ui and (address := links.in_mlflow(ctx.run, ui.mlflow)):
            self._artifacts.append({"key": "mlflow", "type": "markdown", "data": f"[{run_id}]({address})"})
        self._end = _outcome_of(error)
        self._wake.set()

    def finish(self, timeout_s: float) -> None:
        """Wait until Prefect has everything. What it hasn't in time is copied later, by `hlatctl sync` for example.

        Doesn't wait for a Prefect that is away, nor, if the run has failed, for one that is still starting.
        """
        waits = self._end is not None and (self._flow_run_id is not None or self._end[0] == "finished")
        self._thread.join(timeout_s if waits and not self._is_lost else 0.0)
        self._abandoned.set()
        self._wake.set()
        if self._thread.is_alive():
            links.keep_missed(self._ctx.run, missed=True)

    def _add(self, task: Task) -> None:
        self._tasks.append(task)
        self._wake.set()

    def _log(self, text: str) -> None:
        at = datetime.now(UTC).isoformat()
        self._lines.append({"name": "hlatctl", "level": logging.INFO, "message": text, "timestamp": at})

    def _follow(self) -> None:
        connected = False
        while not self._abandoned.is_set():
            try:
                if not connected:
                    if not self._begin():
                        return
                    prefect_api.connect()
                    connected = True
                elif not prefect_api.is_up():
                    self._abandoned.wait(_POLL_S)
                    continue
                self._report()
                if self._is_lost:
                    links.keep_missed(self._ctx.run, missed=self._was_missed)
                return
            except Exception as error:  # a view: whatever happens to it, the run continues
                if not self._abandoned.is_set():
                    self._lose(f"{type(error).__name__}: {error}")
                if not connected:
                    return

    def _begin(self) -> bool:
        ctx = self._ctx
        return prefect_api.begin(Path(ctx.config.runs_dir), ctx.message, start=ctx.config.tracking.enabled)

    def _lose(self, why: str) -> None:
        ctx, was_lost, self._is_lost = self._ctx, self._is_lost, True
        links.keep_missed(ctx.run, missed=True)
        if not was_lost:
            message = f"Prefect failed ({why}); the run continues without it"
            ctx.event("tracking_lost", what="prefect", message=message)
            ctx.message(message)

    def _report(self) -> None:
        from prefect.client.orchestration import get_client

        ctx = self._ctx
        with get_client(sync_client=True) as client:
            if self._flow_run_id is None:
                lock = ctx.run.driver_lock if self._name == PRETRAIN else ctx.run.evaluator_lock
                prefect_stale.mark_crashed(Path(ctx.config.runs_dir), ctx.message, lock)
                self._flow_run_id = self._begun(client, os.fspath(lock))
            while not self._abandoned.is_set():
                self._wake.wait(_POLL_S)
                self._wake.clear()
                end = self._end
                self._send(client)
                if end is not None:
                    client.set_flow_run_state(self._flow_run_id, prefect_stale.final(*end), force=True)
                    return
                if self._stops and _is_stopped(client, self._flow_run_id) and _request_stop(ctx.run):
                    self._stops = False

    def _begun(self, client: SyncPrefectClient, lock: str) -> UUID:
        """Return the flow run: a child of the task run in ``PARENT_ENV`` if that is set, else the run's earlier one.

        A run that is resumed continues its flow run: stages that run again replace their earlier task runs, and further
        attempts and milestones are added.
        """
        from prefect.states import Running

        ctx, parent = self._ctx, os.environ.get(PARENT_ENV)
        flow_run_id: UUID = prefect_stale.flow_run_of(
            client,
            ctx.run,
            ctx.config,
            self._name,
            lock,
            simulated=ctx.state.simulated,
            parent_task_run_id=UUID(parent) if parent else None,
            again=self._name == PRETRAIN and not parent,
        ).id
        client.set_flow_run_state(flow_run_id, Running(), force=True)
        if self._name == PRETRAIN:
            links.keep_flow_run(ctx.run, flow_run_id)
        return flow_run_id

    def _send(self, client: SyncPrefectClient) -> None:
        """Send what Prefect has not accepted yet; after an error, the same is sent again."""
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        if tasks := self._tasks[:]:
            prefect_stale.report_tasks(client, self._flow_run_id, tasks)
            del self._tasks[: len(tasks)]
        if lines := self._lines[:]:
            client.create_logs([{**line, "flow_run_id": str(self._flow_run_id)} for line in lines])
            del self._lines[: len(lines)]
        percent, due = self._percent, self._end or time.monotonic() >= self._shown_s + _PROGRESS_EVERY_S
        if percent != self._shown_percent and due:
            if self._progress_id is None:
                shown: dict[str, Any] = {"key": "training", "type": "progress", "description": "Optimizer steps"}
                artifact = ArtifactCreate(flow_run_id=self._flow_run_id, data=percent, **shown)
                self._progress_id = client.create_artifact(artifact).id
            else:
                client.update_artifact(self._progress_id, ArtifactUpdate(data=percent))
            self._shown_percent, self._shown_s = percent, time.monotonic()
        while self._artifacts:
            client.create_artifact(ArtifactCreate(flow_run_id=self._flow_run_id, **self._artifacts[0]))
            del self._artifacts[0]


def _outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Return the status of a run or a stage that ended with an error, and a message."""
    if error is None:
        return "finished", ""
    if isinstance(error, StoppedError | KeyboardInterrupt):
        return "stopped", str(error) or "interrupted"
    return "failed", error.message if isinstance(error, HlatctlError) else f"{type(error).__name__}: {error}"


def begin(ctx: FlowContext, name: str = PRETRAIN) -> PrefectView | None:
    """Return a view that has started to report; None if there is no Prefect for this run."""
    view = PrefectView(ctx, name)
    return view if view.start() else None
