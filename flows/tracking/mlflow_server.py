"""MLflow's server with its pages for `hlatctl ui`; it ends with the process that started it.

``python -m flows.tracking.mlflow_server FD RUNS_DIR`` serves on the listening socket that it inherits.
``flows.tracking.local_server`` decides who may use it. `mlflow server` isn't used: it supports passwords only with more
packages and a database of users, and it answers to any host name that begins with 10. or 192.168.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.tracking import mlflow_client
from flows.tracking.connections import inherited, run, take_auth
from flows.tracking.local_server import Gate, own_hosts, own_origins
from hlatctl.run.errors import run_main
from hlatctl.run.paths import mlflow_artifacts


def main(argv: list[str]) -> int:
    """Serve until standard input closes."""
    listener, port = inherited(int(argv[0]))
    auth, runs_dir = take_auth(), Path(argv[1])
    os.environ.update(
        MLFLOW_SERVER_ALLOWED_HOSTS=",".join(own_hosts(port)),
        MLFLOW_SERVER_CORS_ALLOWED_ORIGINS=",".join(own_origins(port)),
        # Switch off what is not needed to show runs.
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        MLFLOW_DISABLE_TELEMETRY="true",
        DO_NOT_TRACK="true",
    )
    # MLflow checks requests only if uvicorn is imported, as here.
    from mlflow.server import constants, handlers

    uri, root = mlflow_client.default_tracking_uri(runs_dir), "mlflow-artifacts:/"
    # The variables that `mlflow server` sets for its processes.
    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = os.environ[constants.REGISTRY_STORE_URI_ENV_VAR] = uri
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = root
    os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = str(mlflow_artifacts(runs_dir.absolute()))
    os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
    with mlflow_client.tables(uri):
        handlers.initialize_backend_stores(uri, uri, root)
    from mlflow.server.fastapi_app import app

    return run(Gate(app, port, auth, health="/health"), listener)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
