"""The pipeline as a Prefect flow: every stage is a task.

Prefect is a view. If it doesn't answer, or disappears during a run, the run continues without it.

Cancelling or suspending a flow run in Prefect stops its run as `hlatctl stop` does. Prefect only marks the flow run as
Cancelling or Suspended. The driver queries the state every few seconds, which is one request to Prefect's server and
none to the training processes.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from conf.schema import Config
from flows.runtime.context import FlowContext
from flows.runtime.driver import Clock
from flows.tracking import links, prefect_api, prefect_stale, ui_record
from flows.tracking.prefect_stale import LOCK, PRETRAIN
from hlatctl.run.errors import RunBusyError, StoppedError, StorageError
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


@contextmanager
def stopping(run: RunPaths, flow_run_id: UUID) -> Iterator[None]:
    """Journal one ``stop_requested`` if the flow run is cancelled or suspended during the block."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(run, flow_run_id, ended), daemon=True, name="prefect-cancel")
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join(_POLL_S)


def _watch(run: RunPaths, flow_run_id: UUID, ended: threading.Event) -> None:
    from prefect.client.orchestration import get_client

    while not ended.wait(_POLL_S):  # again if there is no client, because Prefect doesn't answer
        with prefect_api.tolerated(lambda _why: None), get_client(sync_client=True) as client:
            while not (_is_stopped(client, flow_run_id) and not ended.is_set() and _request_stop(run)):
                if ended.wait(_POLL_S):
                    break
            return


def _is_stopped(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    """Return whether the flow run is cancelled or suspended; False if Prefect doesn't answer.

    A flow run that stays Suspended becomes Failed after some minutes, and can't be Cancelled at its end. So it is set
    to Cancelling from now on.
    """
    from prefect.states import Cancelling

    state = None
    with prefect_api.tolerated(lambda _why: None):
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


Pipeline = Callable[[FlowContext, Any], None]
_T = TypeVar("_T")
_PROGRESS_EVERY_S = 10.0
#: The id of the task run that represents this process's run in a sweep's flow run.
PARENT_ENV = "HLATCTL_PREFECT_PARENT"


class PrefectCaller:
    """Calls every stage as a task of the current flow run."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._of_flow = clock, contextvars.copy_context()

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Run the stage as a task, in this thread."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        def run() -> Any:
            with stop:
                return stage()
            return stop.state()

        stop = _Stop()
        run.__name__ = name.replace(" ", "_")
        # The journal records what is done: Prefect doesn't cache, retry or keep results.
        run_task = task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(run)
        return stop.raised_after(run_task)

    def submit(self, choose: Callable[[], tuple[str, Callable[[], Any]]], *, most: int) -> Future[Any]:
        """Queue a stage that a worker thread chooses, as a task of the same flow run.

        The caller may be inside a task, such as an attempt. Prefect's timeline shows no task inside another one.
        """
        context = self._of_flow.copy()
        return self._clock.beside(lambda: context.run(self.call, *choose()), most=most)


class _Stop:
    """Hides a requested stop from Prefect, which would report a failure, and raises it again after Prefect."""

    def __init__(self) -> None:
        self._error: StoppedError | KeyboardInterrupt | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, StoppedError | KeyboardInterrupt):
            self._error = error
        return self._error is not None

    def state(self) -> Any:
        from prefect.states import Cancelled

        return Cancelled(message=str(self._error) or "interrupted")

    def raised_after(self, call: Callable[[], _T]) -> _T:
        """Call a flow or a task; raise the stop if it was stopped."""
        try:
            return call()
        finally:
            if self._error is not None:
                raise self._error


class _Progress:
    """An observer that also updates a progress artifact in Prefect. After the first failure it publishes nothing."""

    def __init__(self, ctx: FlowContext) -> None:
        self._ctx, self._inner = ctx, ctx.observer
        self._artifact: Any = None
        self._next_s = 0.0
        self._lost = False

    def update(self, state: RunState, config: Config) -> None:
        """Update the wrapped observer and, at most every few seconds, Prefect."""
        self._inner.update(state, config)
        if time.monotonic() >= self._next_s and state.step:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            self.publish(lambda: self._show(100.0 * state.step / config.total_steps))

    def message(self, text: str) -> None:
        self._inner.message(text)

    def publish(self, work: Callable[[], Any]) -> None:
        if not self._lost:
            with prefect_api.tolerated(self._lose):
                work()

    def _lose(self, why: str) -> None:
        self._lost = True
        _report_lost(self._ctx, f"Prefect doesn't answer any more ({why}); the run continues")

    def _show(self, percent: float) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, key="training", description="Optimizer steps")
        else:
            update_progress_artifact(self._artifact, progress=percent)


def run_under_prefect(ctx: FlowContext, pipeline: Pipeline, name: str = PRETRAIN) -> bool:
    """Run the pipeline as a Prefect flow.

    Returns:
        False if there is no Prefect, or if it failed, before or during the pipeline. The stages are idempotent, so the
        pipeline can be called again without Prefect.

    Raises:
        HlatctlError: the pipeline's error.
    """
    runs_dir, lost = Path(ctx.config.runs_dir), list[str]()
    try:
        with prefect_api.tolerated(lost.append):
            if not prefect_api.configure(runs_dir, ctx.message, start=ctx.config.tracking.enabled):
                return False
            lock = ctx.run.driver_lock if name == PRETRAIN else ctx.run.evaluator_lock
            prefect_stale.mark_crashed(runs_dir, ctx.message, lock)
            stop = _Stop()
            flow = _make_flow(ctx, pipeline, name, stop)
            parameters = prefect_stale.parameters_of(ctx.run, ctx.config, os.fspath(lock))
            tags = prefect_stale.tags_of(ctx.config, simulated=ctx.state.simulated)
            call = partial(_call, flow, parameters, tags=tags, run=ctx.run if name == PRETRAIN else None)
            stop.raised_after(call)
    except BaseException as error:
        # Prefect turns SIGTERM into an exception of its own; without Prefect it just ends this process.
        if prefect_api.is_prefects(error):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    if lost:
        _report_lost(ctx, f"Prefect failed ({lost[0]}); the run continues without it")
    return not lost


def _make_flow(ctx: FlowContext, pipeline: Pipeline, name: str, stop: _Stop) -> Any:
    from prefect import flow, get_run_logger, runtime
    from prefect.artifacts import create_link_artifact, create_markdown_artifact

    from hlatctl.report.summary import summary_markdown

    @flow(
        name=marked(name, simulated=ctx.state.simulated),
        flow_run_name=marked(ctx.run.run_id, simulated=ctx.state.simulated),
        persist_result=False,
        validate_parameters=False,
    )
    def run_flow(run_id: str, experiment: str, lock: str) -> Any:
        ctx.message_sinks.append(get_run_logger().info)
        watcher, progress = ctx.observer, _Progress(ctx)
        ctx.observer = progress
        try:
            with stop, ctx.signals.kept():  # again: Prefect has installed its own handler of SIGTERM
                with _cancellable(ctx, name, runtime.flow_run.get_id()):
                    pipeline(ctx, PrefectCaller(ctx.clock))
                return None
            return stop.state()
        finally:
            ctx.observer = watcher
            ctx.message_sinks.clear()
            summary = summary_markdown(ctx.run, ctx.config)
            progress.publish(lambda: create_markdown_artifact(summary, key="summary", description=run_id))
            ui = ui_record.read(Path(ctx.config.runs_dir))
            if ui and (address := links.in_mlflow(ctx.run, ui.mlflow)):
                progress.publish(lambda: create_link_artifact(address, link_text=run_id, key="mlflow"))

    return run_flow


def _cancellable(ctx: FlowContext, name: str, flow_run_id: Any) -> AbstractContextManager[None]:
    """Return a block in which a cancellation in Prefect stops the run; an evaluation can't be stopped this way."""
    return stopping(ctx.run, UUID(flow_run_id)) if name == PRETRAIN else nullcontext()


def _call(flow: Any, parameters: dict[str, str], *, tags: list[str], run: RunPaths | None) -> None:
    """Run the flow as a child of the task run in ``PARENT_ENV`` if that is set, else as the run's earlier flow run.

    A run that is resumed continues its flow run: stages that run again replace their earlier task runs, and further
    attempts and milestones are added. Only the flow run has tags: for a task run with tags, Prefect asks its server
    about limits, and the run would depend on the answer.
    """
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow
    from prefect.states import Pending

    parent = os.environ.get(PARENT_ENV)
    with get_client(sync_client=True) as client:
        flow_run = None
        if run and not parent:
            flow_run = prefect_stale.find(client, flow.name, flow.flow_run_name, parameters[LOCK])
        if flow_run is not None:
            client.set_flow_run_state(flow_run.id, Pending(message="resumed"), force=True)
            flow_run = client.read_flow_run(flow_run.id)
        else:
            parent_id = UUID(parent) if parent else None
            flow_run = prefect_stale.create(
                client, flow, flow.flow_run_name, parameters, tags=tags, parent_task_run_id=parent_id
            )
    if run:
        links.keep_flow_run(run, flow_run.id)
    run_flow(flow, flow_run=flow_run, parameters=parameters)


def _report_lost(ctx: FlowContext, message: str) -> None:
    links.keep_missed(ctx.run, missed=True)
    ctx.event("tracking_lost", what="prefect", message=message)
    ctx.message(message)
