"""A run or an evaluation as a Prefect flow: every stage is a task. Nothing waits for Prefect.

Prefect is a view. If it doesn't answer, or disappears during a run, the run continues without it, and what it has
missed is copied from the journal later (``prefect_stale``).

Cancelling or suspending a flow run in Prefect stops its run as `hlatctl stop` does. Prefect only marks the flow run as
Cancelling or Suspended. The thread queries the state every few seconds, which is one request to Prefect's server and
none to the training processes.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from conf.schema import Config
from flows.runtime.context import FlowContext
from flows.tracking import links, prefect_api, prefect_stale, ui_record
from flows.tracking.prefect_api import PARENT_ENV
from flows.tracking.prefect_stale import PRETRAIN
from hlatctl.run.errors import HlatctlError, RunBusyError, StoppedError, StorageError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.labels import marked
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from hlatctl.run.stopping import request

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


#: The requester of the stop, in the journal.
BY = "a person in Prefect"
_POLL_S = 3.0
_PROGRESS_EVERY_S = 10.0
#: Time for the sweep's driver to create the task run that is the parent of a trial's flow run, once Prefect answers.
_PARENT_S = 60.0


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


@dataclass(eq=False)
class _Stage:
    """A stage that runs in the driver, and the end of it for its task."""

    name: str
    ended: threading.Event = field(default_factory=threading.Event)
    outcome: tuple[str, str] = ("running", "")


class PrefectView:
    """A flow run in Prefect's engine that follows the driver's stages, and the caller of these stages.

    The engine runs in a thread of its own: the flow begins as soon as the API answers, and each task waits for its
    stage. So training waits for Prefect neither before nor during a run. A view is also an observer that passes
    progress on.

    Args:
        name: the flow; only a ``PRETRAIN`` flow run can be cancelled, and continues that of the run's earlier drivers.
    """

    def __init__(self, ctx: FlowContext, name: str = PRETRAIN) -> None:
        self._ctx, self._name = ctx, name
        self._inner = ctx.observer
        #: What has happened in the driver. It only appends, and the flow reads on from where it was.
        self._stages: list[_Stage] = []
        self._lines: list[str] = []
        self._percent = 0.0
        self._end: tuple[str, str] | None = None
        self._is_lost, self._has_begun = False, False
        self._wake, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="prefect")

    def start(self) -> bool:
        """Start to follow; return False if there is no Prefect for this run."""
        # An API that the user names may answer late, so the thread asks it.
        if not prefect_api.is_named():
            self._has_begun = self._begin()
            if not self._has_begun:
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
            self._end = _outcome_of(error)
            self._wake.set()

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Run a stage in this thread, and end its task as the stage ends."""
        followed = _Stage(name)
        self._stages.append(followed)
        self._wake.set()
        try:
            result = stage()
        except BaseException as error:
            followed.outcome = _outcome_of(error)
            raise
        else:
            followed.outcome = ("finished", "")
            return result
        finally:
            followed.ended.set()

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

    def finish(self, timeout_s: float) -> None:
        """Wait until Prefect has everything. What it hasn't in time is copied later, by `hlatctl sync` for example.

        Doesn't wait for a Prefect that is away, nor, if the run has failed, for one that is still starting.
        """
        waits = self._end is not None and (self._end[0] != "failed" or prefect_api.is_up())
        self._thread.join(timeout_s if waits and not self._is_lost else 0.0)
        self._abandoned.set()
        self._wake.set()
        if self._thread.is_alive():
            links.keep_missed(self._ctx.run, missed=True)

    def _log(self, text: str) -> None:
        self._lines.append(text)

    def _begin(self) -> bool:
        ctx = self._ctx
        return prefect_api.begin(Path(ctx.config.runs_dir), ctx.message, start=ctx.config.tracking.enabled)

    def _follow(self) -> None:
        try:
            if self._has_begun or self._begin():
                prefect_api.connect()
                if not self._abandoned.is_set():
                    self._run_flow()
        except Exception as error:  # a view: whatever happens to it, the run continues
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        if self._is_lost:
            return
        ctx, self._is_lost = self._ctx, True
        links.keep_missed(ctx.run, missed=True)
        if self._abandoned.is_set():
            return
        message = f"Prefect failed ({why}); the run continues without it"
        ctx.event("tracking_lost", what="prefect", message=message)
        ctx.message(message)

    def _run_flow(self) -> None:
        """Run the flow as a child of the task run in ``PARENT_ENV`` if that is set, else as the run's earlier flow run.

        A run that is resumed continues its flow run: stages that run again replace their earlier task runs, and further
        attempts and milestones are added.
        """
        # The task engine too: its circular imports can fail if the threads of two tasks are the first to import it.
        from prefect import flow, runtime, task_engine  # noqa: F401
        from prefect.client.orchestration import get_client
        from prefect.exceptions import Pause
        from prefect.flow_engine import run_flow
        from prefect.states import Pending

        ctx, simulated = self._ctx, self._ctx.state.simulated
        lock = ctx.run.driver_lock if self._name == PRETRAIN else ctx.run.evaluator_lock
        prefect_stale.mark_crashed(Path(ctx.config.runs_dir), ctx.message, lock)

        @flow(name=marked(self._name, simulated=simulated), persist_result=False, validate_parameters=False)
        def follow(run_id: str, experiment: str, lock: str) -> Any:
            return self._flow(UUID(runtime.flow_run.get_id()))

        with get_client(sync_client=True) as client:
            parent = self._parent(client)
            if self._abandoned.is_set():
                return  # the journal is copied instead
            flow_run = prefect_stale.flow_run_of(
                client,
                ctx.run,
                ctx.config,
                self._name,
                os.fspath(lock),
                simulated=simulated,
                parent_task_run_id=parent,
                again=self._name == PRETRAIN and not parent,
            )
            client.set_flow_run_state(flow_run.id, Pending(), force=True)
            flow_run = client.read_flow_run(flow_run.id)
        try:
            run_flow(follow, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")
        except Pause:  # suspended: the engine gives no task, nor the flow, another state; it is copied from the journal
            links.keep_missed(ctx.run, missed=True)

    def _parent(self, client: SyncPrefectClient) -> UUID | None:
        """Return the task run of this trial of a sweep; None if it isn't a trial, or there is no task run in time."""
        deadline = time.monotonic() + _PARENT_S
        while (parent := prefect_stale.parent_task_run(client)) is None and PARENT_ENV in os.environ:
            if time.monotonic() > deadline or self._abandoned.wait(1.0):
                break
        return parent

    def _flow(self, flow_run_id: UUID) -> Any:
        """Follow the stages until the driver's end."""
        from prefect import get_run_logger
        from prefect.artifacts import create_link_artifact, create_markdown_artifact
        from prefect.client.orchestration import get_client

        from hlatctl.report.summary import summary_markdown

        ctx, logger, progress = self._ctx, get_run_logger(), _Progress()
        stops, tasks, lines = self._name == PRETRAIN, list[threading.Thread](), 0
        end: tuple[str, str] | None = None
        if self._name == PRETRAIN:
            links.keep_flow_run(ctx.run, flow_run_id)
        with get_client(sync_client=True) as client:
            while end is None:
                self._wake.wait(_POLL_S)
                self._wake.clear()
                end = self._end
                for stage in self._stages[len(tasks) :]:
                    work = partial(contextvars.copy_context().run, self._run_task, stage)
                    tasks.append(threading.Thread(target=work, daemon=True, name=f"prefect {stage.name}"))
                    tasks[-1].start()
                    if stage.ended.is_set():
                        tasks[-1].join()  # so that the tasks of past stages are in their order
                for text in self._lines[lines:]:
                    logger.info(text)
                    lines += 1
                with prefect_api.tolerated(self._lose):
                    progress.show(self._percent, now=end is not None)
                    if stops and end is None and _is_stopped(client, flow_run_id) and _request_stop(ctx.run):
                        stops = False
        for task in tasks:
            task.join()
        with prefect_api.tolerated(self._lose):
            summary = summary_markdown(ctx.run, ctx.config)
            create_markdown_artifact(summary, key="summary", description=ctx.run.run_id)
            ui = ui_record.read(Path(ctx.config.runs_dir))
            if ui and (address := links.in_mlflow(ctx.run, ui.mlflow)):
                create_link_artifact(address, link_text=ctx.run.run_id, key="mlflow")
        return prefect_stale.final(*end)

    def _run_task(self, stage: _Stage) -> None:
        from prefect import task
        from prefect.cache_policies import NO_CACHE
        from prefect.exceptions import Pause

        def wait() -> Any:
            stage.ended.wait()
            return prefect_stale.final(*stage.outcome)

        wait.__name__ = stage.name.replace(" ", "_")
        try:
            # The journal records what is done: Prefect doesn't cache, retry or keep results.
            followed = task(name=stage.name, task_run_name=stage.name, cache_policy=NO_CACHE, persist_result=False)(
                wait
            )
            with suppress(Pause):  # suspended meanwhile
                followed(return_state=True)
        except Exception as error:
            self._lose(f"{type(error).__name__}: {error}")


class _Progress:
    """A progress artifact in Prefect."""

    def __init__(self) -> None:
        self._artifact: Any = None
        self._shown_percent, self._shown_s = 0.0, 0.0

    def show(self, percent: float, *, now: bool) -> None:
        """Show a new number, at most every few seconds."""
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if percent == self._shown_percent or not (now or time.monotonic() >= self._shown_s + _PROGRESS_EVERY_S):
            return
        self._shown_percent, self._shown_s = percent, time.monotonic()
        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, key="training", description="Optimizer steps")
        else:
            update_progress_artifact(self._artifact, progress=percent)


def _outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Return the status of a run or a stage that ended with an error, and a message."""
    if error is None:
        return "finished", ""
    if isinstance(error, StoppedError | KeyboardInterrupt):
        return "stopped", str(error) or "interrupted"
    return "failed", error.message if isinstance(error, HlatctlError) else f"{type(error).__name__}: {error}"


def begin(ctx: FlowContext, name: str = PRETRAIN) -> PrefectView | None:
    """Return a view that has started to follow; None if there is no Prefect for this run."""
    view = PrefectView(ctx, name)
    return view if view.start() else None
