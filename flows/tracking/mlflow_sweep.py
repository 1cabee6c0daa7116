"""What the MLflow run of a sweep says, the parent of its trials' runs.

``python -m flows.tracking.mlflow_sweep SWEEP_DIR`` copies status, parameters and figures from the sweep's journal. It
is idempotent and never in the way of a sweep, as ``flows.tracking.mlflow_sync`` never is of a run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import TrackingConfig
from flows.tracking import mlflow_sync
from flows.tracking.mlflow_parent import parent_run_id
from hlatctl.report.sweep import best
from hlatctl.run.errors import run_main
from hlatctl.run.journal import read_events
from hlatctl.run.paths import SweepPaths
from hlatctl.run.redact import hide
from hlatctl.run.sweep import SweepState, fold

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MAX_PARAM_CHARS = 6000


def conclude(sweep: SweepPaths, tracking: TrackingConfig) -> None:
    """Bring the parent's status, parameters and figures up to date.

    Raises:
        DependencyError: MLflow is not installed.
        StorageError: MLflow can't be reached, or refuses.
    """
    uri = tracking.mlflow_uri or mlflow_sync.default_tracking_uri(sweep.root.parent)
    with mlflow_sync.as_storage_error(uri):
        client = mlflow_sync.connect(uri, sweep.root.parent)
        experiment = client.get_experiment_by_name(tracking.experiment)
        if experiment is None:  # no trial has come so far
            return
        run_id = parent_run_id(client, str(experiment.experiment_id), sweep)
        _log(client, run_id, fold(read_events(sweep)))


def _log(client: MlflowClient, run_id: str, state: SweepState) -> None:
    from mlflow.entities import Metric, Param

    params = {"objective": state.objective, "direction": state.direction, "overrides": " ".join(state.overrides)}
    params |= {f"sweep.{name}": str(value) for name, value in state.settings.items()}
    winner = best(state)
    figures = {
        "trials": len(state.trials),
        "trials_finished": state.count("finished"),
        "process_hours": sum(trial.process_hours for trial in state.trials.values()),
        "saved_process_hours": sum(trial.saved_process_hours for trial in state.trials.values()),
        **({"best_objective": winner.mean} if winner and winner.mean is not None else {}),
    }
    now_ms = int(state.last_event_unix_s * 1000)
    known = client.get_run(run_id).data.params  # which MLflow lets nobody change
    client.log_batch(
        run_id,
        metrics=[Metric(name, float(value), now_ms, 0) for name, value in figures.items()],
        params=[Param(name, hide(value)[:_MAX_PARAM_CHARS]) for name, value in params.items() if name not in known],
    )
    if winner:
        client.set_tag(run_id, "hlatctl.best", winner.text)
    client.set_terminated(run_id, status=_STATUS.get(state.status, "RUNNING"), end_time=now_ms)


def main(argv: list[str]) -> int:
    """``python -m flows.tracking.mlflow_sweep SWEEP_DIR``."""
    import conf.load

    sweep = SweepPaths(Path(argv[0]).absolute())
    trial = next(iter(fold(read_events(sweep)).trials.values()))
    conclude(sweep, conf.load.load(sweep.trial(trial.number).config).tracking)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
