"""A sweep in MLflow: one run with its status, parameters and numbers, the parent of its trials' runs.

The first trial that is copied creates the sweep's run. ``python -m flows.tracking.mlflow_sweep SWEEP_DIR`` copies the
rest from the sweep's journal; it is idempotent.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from conf.of_run import of_run
from conf.schema import TrackingConfig
from flows.tracking import mlflow_client
from hlatctl.report.sweep import best
from hlatctl.run.errors import run_main
from hlatctl.run.journal import Event, read_events
from hlatctl.run.labels import marked
from hlatctl.run.lease import hold
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import SweepState, fold

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_SWEEP_TAG, _TRIAL_TAG, _PARENT_TAG = "hlatctl.sweep_id", "hlatctl.trial", "mlflow.parentRunId"
_CREATED_TAG = "hlatctl.sweep_created_unix_s"
_POLL_S = 0.1


def trial_tags(client: MlflowClient, experiment_id: str, runs_dir: Path, created: Event) -> dict[str, str]:
    """Return the tags that make a run a child of its sweep's run; none if the run isn't a trial.

    Args:
        experiment_id: the experiment of the run.
        runs_dir: folder with the run and the sweep.
        created: the run's ``run_created`` event.
    """
    if "sweep" not in created:
        return {}
    sweep = SweepPaths(runs_dir / str(created["sweep"]))
    tags = {_SWEEP_TAG: sweep.run_id, _TRIAL_TAG: str(created["trial"])}
    if sweep.space.is_file():  # otherwise the trial was copied to another runs folder
        tags[_PARENT_TAG] = _parent_run_id(client, experiment_id, sweep)
    return tags


def conclude(sweep: SweepPaths, tracking: TrackingConfig) -> None:
    """Copy a sweep's status, parameters and numbers to its MLflow run.

    Raises:
        DependencyError: MLflow is not installed.
        StorageError: MLflow doesn't answer, or rejects a request.
    """
    state = fold(read_events(sweep))
    with mlflow_client.connection(tracking, sweep.root.parent) as (client, _):
        experiment = client.get_experiment_by_name(marked(tracking.experiment, simulated=state.simulated))
        if experiment is not None:  # otherwise no trial has been copied yet
            run_id = _parent_run_id(client, str(experiment.experiment_id), sweep)
            _log(client, run_id, state)


def _parent_run_id(client: MlflowClient, experiment_id: str, sweep: SweepPaths) -> str:
    """Return the id of the sweep's MLflow run, which is created if it doesn't exist. A lock prevents a second one."""
    state = fold(read_events(sweep))
    identity = {_SWEEP_TAG: state.sweep_id, _CREATED_TAG: repr(state.created_unix_s)}
    with hold(sweep.root / "mirror.lock", lambda _: time.sleep(_POLL_S)):
        run = mlflow_client.find_run(client, experiment_id, identity)
        if run is None:
            tags = identity | {"hlatctl.simulated": str(state.simulated).lower()}
            name = marked(state.sweep_id, simulated=state.simulated)
            run = client.create_run(experiment_id, int(state.created_unix_s * 1000), tags, name)
        return str(run.info.run_id)


def _log(client: MlflowClient, run_id: str, state: SweepState) -> None:
    from mlflow.entities import Metric

    params = {"objective": state.objective, "direction": state.direction, "overrides": " ".join(state.overrides)}
    params |= {f"sweep.{name}": str(value) for name, value in state.settings.items()}
    winner = best(state)
    numbers = {
        "trials": len(state.trials),
        "trials_finished": state.count("finished"),
        "process_hours": sum(trial.process_hours for trial in state.trials.values()),
        "saved_process_hours": sum(trial.saved_process_hours for trial in state.trials.values()),
        **({"best_objective": winner.mean} if winner and winner.mean is not None else {}),
    }
    now_ms = int(state.last_event_unix_s * 1000)
    known = client.get_run(run_id).data.params
    mlflow_client.log_params(client, run_id, {name: value for name, value in params.items() if name not in known})
    client.log_batch(run_id, metrics=[Metric(name, float(value), now_ms, 0) for name, value in numbers.items()])
    if winner:
        client.set_tag(run_id, "hlatctl.best", winner.text)
    client.set_terminated(run_id, status=mlflow_client.STATUS.get(state.status, "RUNNING"), end_time=now_ms)


def main(argv: list[str]) -> int:
    """Run ``python -m flows.tracking.mlflow_sweep SWEEP_DIR``."""
    sweep = SweepPaths(Path(argv[0]).absolute())
    trial = next(iter(fold(read_events(sweep)).trials.values()))
    conclude(sweep, of_run(sweep.trial(trial.number)).tracking)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
