"""A run's name, tags and notes as MLflow shows them: the run's name, its tags, and its description."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hlatctl.run.journal import OPERATOR_WRITER, Event, writer_events
from hlatctl.run.labels import LABELLED, LabelState, apply
from hlatctl.run.paths import RunPaths
from hlatctl.run.simulated import marked
from hlatctl.units import utc

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NAME, _DESCRIPTION = "mlflow.runName", "mlflow.note.content"


def copy_labels(client: MlflowClient, mlflow_run_id: str, run: RunPaths, new: list[Event], *, simulated: bool) -> None:
    """Set the labels as the whole journal describes them, if one of the new events changes them."""
    if not any(event["kind"] == LABELLED for event in new):
        return
    labels = LabelState()
    for event in writer_events(run, OPERATOR_WRITER):
        if event["kind"] == LABELLED:
            apply(labels, event)
    client.set_tag(mlflow_run_id, _NAME, marked(labels.name or run.run_id, simulated=simulated))
    for key, value in labels.tags.items():
        client.set_tag(mlflow_run_id, key, value)
    kept = client.get_run(mlflow_run_id).data.tags
    for key in {key for event in new for key in event.get("untag", [])} - set(labels.tags):
        if key in kept:
            client.delete_tag(mlflow_run_id, key)
    if labels.notes:
        text = "\n\n".join(f"{utc(note.time_unix_s)}, {note.by}: {note.text}" for note in labels.notes)
        client.set_tag(mlflow_run_id, _DESCRIPTION, text)
