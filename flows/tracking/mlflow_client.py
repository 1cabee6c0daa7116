"""The connection to MLflow, how runs and sweeps are found and logged there, and MLflow's own system metrics.

The metrics of the training machine (processors, memory, disk, network, NVIDIA GPUs) are measured alongside a run, every
10 s. They are not in the journal, so what MLflow does not accept is lost. MLflow's variables control them:
``MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true`` switches them on, and ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` sets the
seconds. Under Slurm and Kubernetes the copying process runs on another machine than training, so nothing is measured.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema import Config
from flows.tracking import ui_record
from hlatctl.run import files
from hlatctl.run.errors import DependencyError, HlatctlError, StorageError, install
from hlatctl.run.files import DAMAGED, locked_file
from hlatctl.run.paths import RunPaths, mlflow_database
from hlatctl.run.redact import hide

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


SQLITE = "sqlite:///"
#: MLflow's REST API accepts no longer value of a parameter.
_MAX_PARAM_CHARS = 6000

#: MLflow imports these packages if they are installed, which takes 75 MiB. Its client doesn't use them: mlflow-skinny
#: has the same client, and doesn't depend on them.
_UNUSED = ("pandas", "scipy", "pyarrow")

#: With MLflow's own defaults, a request to a server that doesn't answer takes many minutes.
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def default_tracking_uri(runs_dir: Path) -> str:
    """Return MLflow's address if none is configured: a database in the runs folder."""
    return f"{SQLITE}{mlflow_database(runs_dir.absolute())}"


def address(run: RunPaths, config: Config) -> str:
    """Return the address of the MLflow of a run or a sweep. It may contain a password."""
    return config.tracking.mlflow_uri or default_tracking_uri(run.root.parent)


def copied_to(run: RunPaths) -> dict[str, str]:
    """Return where a run was copied to: ``target`` (the address, without a password), ``run_id``, ``experiment_id``.

    Raises:
        OSError, or one of ``DAMAGED``: it has not been copied.
    """
    cursor = files.read_sealed_json(run.mirror_cursor("mlflow"))
    return {"target": str(cursor["target"]), **{key: str(cursor["kept"][key]) for key in ("run_id", "experiment_id")}}


@contextmanager
def connection(run: RunPaths, config: Config) -> Iterator[MlflowClient]:
    """Connect to the MLflow of a run or a sweep; yield a client.

    Raises:
        DependencyError: MLflow is not installed.
        StorageError: MLflow doesn't answer, or rejects a request; the message contains no credentials.
    """
    uri = address(run, config)
    try:
        yield connect(uri, run.root.parent)
    except HlatctlError:
        raise
    except Exception as error:  # MlflowException, SQLAlchemyError, OSError and requests' errors
        raise not_accepted(f"tracking.mlflow_uri={hide(uri)}", "MLflow", error) from error


def not_accepted(setting: str, title: str, error: Exception) -> StorageError:
    """Return the error of a service that doesn't answer or rejects a request. The run doesn't depend on it."""
    lines = hide(str(error)).splitlines() or [type(error).__name__]
    hint = f"the run continues without {title}; `hlatctl sync` copies the rest later"
    return StorageError(f"{setting}: {lines[0][:300]}", hint=hint)


def connect(uri: str, runs_dir: Path | None = None) -> MlflowClient:
    """Return an MLflow client with short timeouts, and with the password if `hlatctl ui` serves that address."""
    for name, value in _MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ui = ui_record.read(runs_dir) if runs_dir else None
    if ui and ui.mlflow == uri.rstrip("/"):
        # The password changes at each start of the server. A client reads the variables for each request.
        os.environ["MLFLOW_TRACKING_USERNAME"], _, os.environ["MLFLOW_TRACKING_PASSWORD"] = ui.auth.partition(":")
    if uri.startswith(SQLITE):
        _check_sqlite(Path(uri.removeprefix(SQLITE)))
    try:
        with tables(uri):
            with suppress(ImportError), _without(*_UNUSED):
                return _new_client(uri)
            return _new_client(uri)
    except ImportError as error:
        raise DependencyError(
            f"tracking.enabled=true: mlflow can't be imported ({error})",
            hint=f"{install('head')}, or tracking.enabled=false",
        ) from None


@contextmanager
def tables(uri: str) -> Iterator[None]:
    """Hold a lock while MLflow creates the tables of a SQLite database: two simultaneous processes would both fail."""
    if not uri.startswith(SQLITE):
        yield
        return
    path = Path(uri.removeprefix(SQLITE))
    with locked_file(path.with_name(f".{path.name}.lock")):
        yield


def _new_client(uri: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


@contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Import as if these packages weren't installed, unless they are already imported."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def tags_of(client: MlflowClient, run_id: str) -> Mapping[str, str] | None:
    """Return the tags of an MLflow run; None if it no longer exists: people delete runs and databases."""
    from mlflow.exceptions import MlflowException

    try:
        known = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return known.data.tags if known.info.lifecycle_stage == "active" else None


def find_run(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> Run | None:
    """Return the MLflow run that has these tags, or None."""
    wanted = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())
    return next(iter(client.search_runs([experiment_id], wanted, max_results=1)), None)


def log_params(client: MlflowClient, run_id: str, values: Mapping[str, object]) -> None:
    """Log parameters with passwords hidden. MLflow splits them into requests; a parameter can't be changed later."""
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, hide(str(value))[:_MAX_PARAM_CHARS]) for key, value in values.items()])


def _check_sqlite(path: Path) -> None:
    # MLflow would retry for an hour to open a file that can't be opened.
    try:
        with closing(sqlite3.connect(path, timeout=10)) as database:
            database.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        raise StorageError(
            f"tracking.mlflow_uri={SQLITE}{path}: can't be opened ({error})",
            hint="choose another with tracking.mlflow_uri=, or tracking.enabled=false",
        ) from None


ENABLE_ENV = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"


class SystemMetrics:
    """Measures this machine while a run trains on it.

    Args:
        say: called if the metrics are switched on and can't be measured.
    """

    def __init__(self, run: RunPaths, config: Config, say: Callable[[str], None]) -> None:
        self._run, self._config = run, config
        self._monitor: Any = None  # MLflow's monitor has no types
        wanted = os.environ.get(ENABLE_ENV, "").lower() in ("true", "1")
        self._wanted = wanted and config.cluster.jobs_run == "here"
        if self._wanted and find_spec("psutil") is None:
            say(f"{ENABLE_ENV}: MLflow measures with psutil, which is not installed (pip install psutil)")
            self._wanted = False

    def keep_measuring(self) -> None:
        """Start measuring if the run is in MLflow; restart after MLflow has not answered, which ends the measuring."""
        if not self._wanted or (self._monitor is not None and _is_alive(self._monitor)):
            return
        try:
            mlflow_run_id = copied_to(self._run)["run_id"]
        except (OSError, *DAMAGED):
            return
        from mlflow.system_metrics import system_metrics_monitor

        monitor: Any = system_metrics_monitor.SystemMetricsMonitor
        uri = address(self._run, self._config)
        self._monitor = monitor(mlflow_run_id, resume_logging=True, tracking_uri=uri)
        self._monitor.start()

    def end(self) -> None:
        """Stop measuring."""
        if self._monitor is not None:
            self._monitor.finish()


@contextmanager
def measuring(run: RunPaths, config: Config, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Yield a function that measures this machine from the first call on; see :class:`SystemMetrics`."""
    metrics = SystemMetrics(run, config, say)
    try:
        yield metrics.keep_measuring
    finally:
        metrics.end()


def _is_alive(monitor: Any) -> bool:
    return bool(monitor._process and monitor._process.is_alive())
