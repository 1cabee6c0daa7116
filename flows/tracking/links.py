"""Addresses of a run's pages in Prefect and MLflow."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from flows.tracking import mlflow_client
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths

#: Without it, MLflow's pages show agents and traces.
_TRAINING = "workflowType=machine_learning"


def in_prefect(run: RunPaths, server: str | None) -> str | None:
    """Return the address of a run's flow run on a server; None without a server or a flow run."""
    (flow_run,) = _fields(run.prefect, "flow_run_id")
    return f"{server}/runs/flow-run/{flow_run}" if server and flow_run else None


def in_mlflow(run: RunPaths, server: str | None) -> str | None:
    """Return the address of a run's charts on the MLflow that it was copied to.

    Args:
        server: address of the server that shows the database of the runs folder, or of one of its pages; None: it isn't
            running.

    Returns:
        None if the run has not been copied, or if no known server shows it.
    """
    experiment, number, copied_to = _fields(run.mirror, "experiment_id", "mlflow_run_id", "tracking_uri")
    if copied_to.startswith(("http://", "https://")):
        address: str | None = copied_to
    else:
        address = server if copied_to == mlflow_client.default_tracking_uri(run.root.parent) else None
    if not (address and experiment and number):
        return None
    base = address.partition("#")[0].rstrip("/")
    return f"{base}/#/experiments/{experiment}/runs/{number}/model-metrics?{_TRAINING}"


def keep_flow_run(run: RunPaths, flow_run_id: object) -> None:
    """Keep the id of a run's flow run, for :func:`in_prefect`. A failure to write it is ignored."""
    with suppress(OSError, StorageError):
        files.write_json(run.prefect, {"flow_run_id": str(flow_run_id)})


def _fields(path: Path, *names: str) -> list[str]:
    try:
        content = files.read_json(path)
        return [str(content[name]) for name in names]
    except (OSError, *DAMAGED):
        return [""] * len(names)
