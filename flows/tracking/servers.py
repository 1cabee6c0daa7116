"""The servers of Prefect and MLflow, for one flow or with their pages for `hlatctl ui`.

``python -m flows.tracking.servers prefect FD [--pages]`` and ``mlflow FD RUNS_DIR`` serve on the listening socket that
they inherit, and end with the process that started them. ``flows.tracking.local_server`` decides who may use them.

Prefect's own temporary server isn't used: it outlives a killed flow, ends at Ctrl-C while the flow still reports to it,
and answers anyone. `mlflow server` isn't used: it supports passwords only with more packages and a database of users,
and it answers to any host name that begins with 10. or 192.168.
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

#: Prefect's background services for schedules, pauses, workers and automations, which runs do not have.
_UNUSED_SERVICES = ("SCHEDULER", "LATE_RUNS", "PAUSE_EXPIRATIONS", "FOREMAN", "REPOSSESSOR", "TRIGGERS")


def prefect_settings(auth: str, port: int) -> dict[str, str]:
    """Return variables that make Prefect require a password and refuse requests from other pages."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(own_origins(port)),
        # The default is port 4200, whatever port the pages are served on.
        "PREFECT_SERVER_UI_API_URL": f"{own_origins(port)[0]}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _UNUSED_SERVICES},
    }


def _prefect(port: int, auth: str, pages: str = "") -> Gate:
    os.environ.update(prefect_settings(auth, port))
    from prefect.server.api.server import create_app

    return Gate(create_app(ephemeral=not pages, final=True), port, auth, app_checks=True)


def _mlflow(port: int, auth: str, folder: str) -> Gate:
    runs_dir = Path(folder)
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

    return Gate(app, port, auth, health="/health")


def main(argv: list[str]) -> int:
    """Serve until standard input closes."""
    name, fd, *rest = argv
    listener, port = inherited(int(fd))
    make = _prefect if name == "prefect" else _mlflow
    return run(make(port, take_auth(), *rest), listener)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
