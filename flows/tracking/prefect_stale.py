"""Makes up for what Prefect missed: flow runs whose process has died, and runs during which Prefect was away.

A killed process can't report to Prefect. Each flow run has a parameter :data:`LOCK`, the path of the lock that its
process holds while it lives. If nobody holds it, the flow run is marked as Crashed.

If Prefect doesn't answer, a run or a sweep continues without it. ``prefect.json`` says so, and later the flow run gets
the missing task runs and the final state from the journal. Prefect then shows the time of this copy, because its API
accepts no other.

``python -m flows.tracking.prefect_stale RUNS_DIR`` does both once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from conf.of_run import of_run
from conf.schema import Config
from flows.tracking import links, prefect_api
from hlatctl.run import files
from hlatctl.run.errors import run_main
from hlatctl.run.fold import read_state
from hlatctl.run.journal import read_events
from hlatctl.run.labels import marked
from hlatctl.run.lease import holder, is_held
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.sweep import fold

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

#: The parameter of a flow run that names the lock.
LOCK = "lock"
#: The flow of a whole run; the other flow is one evaluation.
PRETRAIN, EVALUATE = "pretrain", "evaluate"
#: Prefect's page offers to cancel only flow runs of a deployment. Nobody schedules this deployment.
DEPLOYMENT = "hlatctl"
_PAGE = 200
_MESSAGE = "Its process has died."


def mark_crashed(runs_dir: Path, say: Callable[[str], None], own_lock: Path | None = None) -> None:
    """Mark flow runs of a runs folder whose process has died. Prefect must be configured.

    Args:
        say: called for each such flow run, and if the API doesn't answer.
        own_lock: lock of this process, which has no flow run yet; a flow run that names it belongs to an earlier
            process.
    """
    with prefect_api.tolerated(lambda why: say(f"Prefect can't list its flow runs ({why})")):
        _mark_crashed(runs_dir.absolute(), say, own_lock)


def _mark_crashed(runs_dir: Path, say: Callable[[str], None], own_lock: Path | None) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        for flow_run in list(_running(client)):
            lock = _lock(runs_dir, flow_run)
            if lock is None or (lock != own_lock and is_held(lock)):
                continue
            for task_run in _tasks(client, flow_run.id):
                if task_run.state and task_run.state.is_final():
                    continue
                client.set_task_run_state(task_run.id, Crashed(message=_MESSAGE), force=True)
            client.set_flow_run_state(flow_run.id, Crashed(message=_MESSAGE), force=True)
            say(f"{flow_run.name}: its process has died; it is marked as Crashed in Prefect")


def bring_up_to_date(runs_dir: Path, say: Callable[[str], None]) -> None:
    """Mark dead flow runs and fill missed ones, outside a flow.

    If no API is running and there is a database, an API is started.
    """
    if os.environ.get("PREFECT_API_URL") or (prefect_api.home(runs_dir) / "prefect.db").is_file():
        with prefect_api.tolerated(lambda why: say(f"Prefect failed ({why})")):
            with files.created_with(files.PRIVATE):
                prefect_api.configure(runs_dir, say)
            for path in sorted(runs_dir.glob("*/prefect.json")):  # first: a journal knows more than a dead process
                sweep = SweepPaths(path.parent.absolute())
                fill_missed(sweep if sweep.space.is_file() else RunPaths(sweep.root), say)
            mark_crashed(runs_dir, say)


def fill_missed(run: RunPaths, say: Callable[[str], None]) -> None:
    """Copy what Prefect missed of a run or a sweep that has no driver. Prefect must be configured.

    Args:
        say: called for a run that is copied, and if Prefect fails; the copy is then tried again later.
    """
    driver = holder(run.driver_lock)
    if not links.is_missed(run) or (driver and driver.pid != os.getpid()):
        return
    with prefect_api.tolerated(lambda why: say(f"Prefect failed ({why}); {run.run_id} is copied to it later")):
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            if isinstance(run, SweepPaths):
                _fill_sweep(client, run)
            else:
                _fill_run(client, run, parent_task_run(client))
        say(f"{run.run_id}: copied to Prefect what it has missed")


def parent_task_run(client: SyncPrefectClient) -> UUID | None:
    """Return the task run of the trial that this process drives; None if there is none, or none yet."""
    from prefect.exceptions import ObjectNotFound

    with suppress(ObjectNotFound):
        if named := os.environ.get(prefect_api.PARENT_ENV):
            return client.read_task_run(UUID(named)).id
    return None


def _fill_run(client: SyncPrefectClient, run: RunPaths, parent_task_run_id: Any = None) -> None:
    state, config = read_state(run), of_run(run)
    name, lock = (EVALUATE, run.evaluator_lock) if state.evaluates else (PRETRAIN, run.driver_lock)
    flow_run = flow_run_of(
        client,
        run,
        config,
        name,
        os.fspath(lock),
        simulated=state.simulated,
        parent_task_run_id=parent_task_run_id,
        again=True,
    )
    ended = {stage.name.replace("_", " "): stage.status for stage in state.stages.values()}
    ended |= {
        f"train attempt {one.number}": "running"
        if one.ended_unix_s is None
        else "stopped"
        if one.cause == "stopped"
        else "finished"
        for one in state.attempts
    }
    evaluated = (one for one in state.milestones.values() if one.status == "evaluated")
    ended |= {f"evaluate {one.milestone_tokens:,} tokens": "finished" for one in evaluated}
    _fill(client, flow_run, state.status, ended)
    links.keep_flow_run(run, flow_run.id)
    links.keep_missed(run, missed=False)


def _fill_sweep(client: SyncPrefectClient, sweep: SweepPaths) -> None:
    from prefect import flow
    from prefect.states import Running

    state, lock = fold(read_events(sweep)), os.fspath(sweep.driver_lock)
    flow_run = find(client, "sweep", sweep.run_id, lock) or client.create_flow_run(
        flow(name="sweep")(_nothing), name=sweep.run_id, state=Running(), parameters={LOCK: lock}
    )
    trials = {trial.run_id: sweep.trial(trial.number) for trial in state.trials.values()}
    tasks = _fill(client, flow_run, state.status, {trial.run_id: trial.status for trial in state.trials.values()})
    for run_id, trial in trials.items():
        if links.is_missed(trial) and not is_held(trial.driver_lock):
            _fill_run(client, trial, tasks[run_id])
    links.keep_missed(sweep, missed=False)


def _fill(client: SyncPrefectClient, flow_run: Any, status: str, tasks: Mapping[str, str]) -> dict[str, Any]:
    """Add missing task runs, set the states of those that have not ended and of the flow run; return task runs' ids."""
    from prefect import task

    known = {one.name: one for one in _tasks(client, flow_run.id)}
    for name in set(tasks) - set(known):
        known[name] = client.create_task_run(
            task(name=name)(_nothing), flow_run_id=flow_run.id, dynamic_key=name, name=name, state=final(tasks[name])
        )
    for name, one in known.items():
        if not (one.state and one.state.is_final()):
            client.set_task_run_state(one.id, final(tasks.get(name, "running")), force=True)
    wanted = final(status)
    if flow_run.state is None or flow_run.state.type != wanted.type:
        client.set_flow_run_state(flow_run.id, wanted, force=True)
    return {name: one.id for name, one in known.items()}


def final(status: str, message: str = "") -> Any:
    """Return Prefect's final state for the status of a stage, a run, a trial or a sweep."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    if status in ("running", "created"):
        return Crashed(message=_MESSAGE)
    if status == "failed":
        return Failed(message=message or None)
    if status in ("stopped", "paused"):
        return Cancelled(message=message or status)
    return Completed() if status in ("finished", "skipped") else Completed(name=status.capitalize())


def find(client: SyncPrefectClient, flow_name: str, name: str, lock: str) -> Any:
    """Return the newest flow run of a run's earlier drivers, whatever its state; None if there is none."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    found = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[flow_name])),
        flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])),
        sort=FlowRunSort.START_TIME_DESC,
    )
    return next((run for run in found if run.parameters.get(LOCK) == lock), None)


def flow_run_of(
    client: SyncPrefectClient,
    run: RunPaths,
    config: Config,
    name: str,
    lock: str,
    *,
    simulated: bool,
    parent_task_run_id: Any,
    again: bool,
) -> Any:
    """Return the flow run of a run's earlier drivers, if ``again``, else a new one that Prefect's page can cancel.

    Only flow runs have tags: for a task run with tags, Prefect asks its server about limits.
    """
    from prefect import flow
    from prefect.states import Pending

    kind, title = flow(name=marked(name, simulated=simulated))(_nothing), marked(run.run_id, simulated=simulated)
    if again and (flow_run := find(client, kind.name, title, lock)) is not None:
        return flow_run
    tags = [f"experiment: {config.experiment_name}", f"cluster: {config.cluster.name}", *["simulated"] * simulated]
    return client.create_flow_run_from_deployment(
        client.create_deployment(client.create_flow(kind), DEPLOYMENT),
        name=title,
        parameters={"run_id": run.run_id, "experiment": config.experiment_name, LOCK: lock},
        tags=tags,
        parent_task_run_id=parent_task_run_id,
        state=Pending(),
    )


def _nothing() -> None:
    """Represents what has happened in other processes."""


def _running(client: SyncPrefectClient) -> Iterator[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    types = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
    wanted, offset = FlowRunFilter(state=FlowRunFilterState(type=types)), 0
    while page := client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE, offset=offset):
        yield from page
        offset += len(page)


def _tasks(client: SyncPrefectClient, flow_run_id: Any) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    of_flow = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    found: list[Any] = []
    while page := client.read_task_runs(flow_run_filter=of_flow, limit=_PAGE, offset=len(found)):
        found += page
    return found


def _lock(runs_dir: Path, flow_run: Any) -> Path | None:
    """Return the lock that a flow run's process holds; None if the flow run belongs to another runs folder."""
    path = flow_run.parameters.get(LOCK)
    lock = Path(str(path))
    return lock if path and lock.is_relative_to(runs_dir) and ".." not in lock.parts and lock.is_file() else None


def main(argv: list[str]) -> int:
    """Run ``python -m flows.tracking.prefect_stale RUNS_DIR``."""
    bring_up_to_date(Path(argv[0]), lambda text: print(text, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
