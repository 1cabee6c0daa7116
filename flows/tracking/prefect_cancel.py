"""Cancelling or suspending a flow run in Prefect stops its run as `hlatctl stop` does.

Prefect marks the flow run as Cancelling or Suspended, and leaves the rest to whoever runs it. The driver asks for its
flow run's state every few seconds, which is one request to Prefect's server, and none to the training processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from uuid import UUID

from flows.tracking import prefect_api
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.stopping import request

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

#: Who asks for the stop, in the journal.
BY = "a person in Prefect"
_POLL_S = 3.0


@contextmanager
def stopping(run: RunPaths, flow_run_id: UUID) -> Iterator[None]:
    """Journal one ``stop_requested`` if the flow run is cancelled or suspended inside of the block."""
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
    """Return whether Prefect says so; False if it doesn't answer.

    A flow run that stays Suspended becomes Failed after some minutes, and can't be Cancelled at its end. So it is
    Cancelling from now on.
    """
    from prefect.states import Cancelling

    state = None
    with prefect_api.tolerated(lambda _why: None):
        state = client.read_flow_run(flow_run_id).state
        if state is not None and state.is_paused():
            client.set_flow_run_state(flow_run_id, Cancelling(message="suspended: the run stops"), force=True)
    return state is not None and (state.is_cancelling() or state.is_cancelled() or state.is_paused())


def _request_stop(run: RunPaths) -> bool:
    """Return whether the request is in the journal; not while another writes it, or on a full disk."""
    with suppress(RunBusyError, StorageError), JournalWriter(run, OPERATOR_WRITER) as journal:
        request(run, journal, by=BY)
        return True
    return False
