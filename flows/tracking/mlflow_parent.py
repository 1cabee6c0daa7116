"""Trials of a sweep as children of one MLflow run, the sweep's, which the first of them makes.

What that run says is ``flows.tracking.mlflow_sweep``'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hlatctl.run.journal import Event, read_events
from hlatctl.run.locks import locked_file
from hlatctl.run.paths import SweepPaths
from hlatctl.run.simulated import marked
from hlatctl.run.sweep import fold

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

SWEEP_TAG = "hlatctl.sweep_id"
TRIAL_TAG = "hlatctl.trial"
PARENT_TAG = "mlflow.parentRunId"
_CREATED_TAG = "hlatctl.sweep_created_unix_s"


def trial_tags(client: MlflowClient, experiment_id: str, runs_dir: Path, created: Event) -> dict[str, str]:
    """Tags that make a run a child of its sweep's; none for a run that is no trial.

    Args:
        client: MLflow.
        experiment_id: that the run goes to.
        runs_dir: that holds the run and the sweep.
        created: the run's ``run_created`` event.
    """
    if "sweep" not in created:
        return {}
    sweep = SweepPaths(runs_dir / str(created["sweep"]))
    if not sweep.space.is_file():  # the trial has been copied to another runs folder
        return {SWEEP_TAG: sweep.run_id, TRIAL_TAG: str(created["trial"])}
    parent = parent_run_id(client, experiment_id, sweep)
    return {PARENT_TAG: parent, SWEEP_TAG: sweep.run_id, TRIAL_TAG: str(created["trial"])}


def parent_run_id(client: MlflowClient, experiment_id: str, sweep: SweepPaths) -> str:
    """The sweep's MLflow run, which is made if there is none; trials that ask at once get the same."""
    state = fold(read_events(sweep))
    identity = {SWEEP_TAG: state.sweep_id, _CREATED_TAG: repr(state.created_unix_s)}
    wanted = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in identity.items())
    with locked_file(sweep.root / "mirror.lock"):
        found = client.search_runs([experiment_id], wanted, max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = identity | {"hlatctl.simulated": str(state.simulated).lower()}
        name = marked(state.sweep_id, simulated=state.simulated)
        made = client.create_run(experiment_id, int(state.created_unix_s * 1000), tags, name)
        return str(made.info.run_id)
