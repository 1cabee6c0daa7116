"""Marks flow runs in Prefect as Crashed if their process has died.

A killed process can't report to Prefect. Each flow run has a parameter :data:`LOCK`, the path of the lock that its
process holds while it lives. ``python -m flows.tracking.prefect_stale RUNS_DIR`` checks all flow runs once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.tracking import prefect_api
from hlatctl.run import files
from hlatctl.run.errors import run_main
from hlatctl.run.lease import is_held

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

#: The parameter of a flow run that names the lock.
LOCK = "lock"
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
            for task_run in _running_tasks(client, flow_run.id):
                client.set_task_run_state(task_run.id, Crashed(message=_MESSAGE), force=True)
            client.set_flow_run_state(flow_run.id, Crashed(message=_MESSAGE), force=True)
            say(f"{flow_run.name}: its process has died; it is marked as Crashed in Prefect")


def bring_up_to_date(runs_dir: Path, say: Callable[[str], None]) -> None:
    """Call ``mark_crashed`` outside a flow. If no API is running and there is a database, start an API."""
    if os.environ.get("PREFECT_API_URL") or (prefect_api.home(runs_dir) / "prefect.db").is_file():
        with prefect_api.tolerated(lambda why: say(f"Prefect failed ({why})")):
            with files.created_with(files.PRIVATE):
                prefect_api.configure(runs_dir, say)
            mark_crashed(runs_dir, say)


def _running(client: SyncPrefectClient) -> Iterator[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    types = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
    wanted, offset = FlowRunFilter(state=FlowRunFilterState(type=types)), 0
    while page := client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE, offset=offset):
        yield from page
        offset += len(page)


def _running_tasks(client: SyncPrefectClient, flow_run_id: Any) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    of_flow = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    return [
        task for task in client.read_task_runs(flow_run_filter=of_flow) if not (task.state and task.state.is_final())
    ]


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
