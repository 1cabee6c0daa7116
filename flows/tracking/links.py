"""Addresses of a run's pages in Prefect and MLflow."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from flows.tracking import mlflow_client
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths

#: Without it, MLflow's pages show agents and traces.
_TRAINING = "workflowType=machine_learning"


def in_prefect(run: RunPaths, server: str | None) -> str | None:
    """Return the address of a run's flow run; None without a server or a flow run.

    Args:
        server: address of Prefect's pages, which may log in (``local_server.login_page``).
    """
    flow_run = _read(run).get("flow_run_id")
    return f"{server}/runs/flow-run/{flow_run}" if server and flow_run else None


def in_mlflow(run: RunPaths, server: str | None) -> str | None:
    """Return the address of a run's charts on the MLflow that it was copied to.

    Args:
        server: address of the server that shows the database of the runs folder, or of one of its pages; None: it isn't
            running.

    Returns:
        None if the run has not been copied, or if no known server shows it.
    """
    try:
        copied = mlflow_client.copied_to(run)
    except (OSError, *DAMAGED):
        return None
    if copied["target"].startswith(("http://", "https://")):
        address: str | None = copied["target"]
    else:
        address = server if copied["target"] == mlflow_client.default_tracking_uri(run.root.parent) else None
    if not address:
        return None
    base = address.partition("#")[0].rstrip("/")
    return f"{base}/#/experiments/{copied['experiment_id']}/runs/{copied['run_id']}/model-metrics?{_TRAINING}"


def keep_flow_run(run: RunPaths, flow_run_id: object) -> None:
    """Keep the id of a run's flow run, for :func:`in_prefect`. A failure to write it is ignored."""
    _write(run, flow_run_id=str(flow_run_id))


def keep_missed(run: RunPaths, *, missed: bool) -> None:
    """Keep whether Prefect lacks a part of a run or a sweep. A failure to write it is ignored."""
    _write(run, missed=missed)


def is_missed(run: RunPaths) -> bool:
    """Return whether Prefect lacks a part of a run or a sweep, because it was away."""
    return bool(_read(run).get("missed"))


def _read(run: RunPaths) -> dict[str, Any]:
    try:
        return dict(files.read_json(run.prefect))
    except (OSError, *DAMAGED):
        return {}


def _write(run: RunPaths, **fields: Any) -> None:
    with suppress(OSError, StorageError):
        files.write_json(run.prefect, {**_read(run), **fields})
