"""Registers an exported checkpoint as a version of a model in MLflow's registry, linked to the run that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.of_run import of_run
from flows.tracking import mlflow_client, mlflow_sync
from hlatctl.run import files
from hlatctl.run.paths import RunPaths

if TYPE_CHECKING:
    from mlflow import MlflowClient


def register(run: RunPaths, folder: Path, written: Mapping[str, Any]) -> str:
    """Register an exported model as a new version of ``tracking.register_model``, which is created if it is missing.

    Args:
        run: the run that trained it; it is copied to MLflow first.
        folder: the export. MLflow stores its address, not its files.
        written: ``step``, ``dtype`` and ``parameters`` of the export.

    Returns:
        Name and version, such as ``hlat-7b version 3``.

    Raises:
        RunBusyError: another process is copying this run.
        StorageError: MLflow doesn't answer, or rejects a request.
    """
    tracking = of_run(run).tracking
    mlflow_sync.sync(run)
    with mlflow_client.connection(tracking, run.root.parent) as (client, _):
        name = str(tracking.register_model)
        _ensure(client, name)
        version = client.create_model_version(
            name,
            source=folder.absolute().as_uri(),
            run_id=str(files.read_json(run.mirror)["mlflow_run_id"]),
            tags={f"hlatctl.{key}": str(written[key]) for key in ("step", "dtype", "parameters")},
            description=f"Step {written['step']:,} of run {run.run_id}, in Hugging Face format.",
        )
        return f"{name} version {version.version}"


def _ensure(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
