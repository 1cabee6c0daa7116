"""Amendments in MLflow: a parameter there can't change, so each amended key has a tag with the course of its values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.state import AmendmentState

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PREFIX = "hlatctl.amended."
_KINDS = ("config_amended", "amendment_applied")
#: MLflow takes tags of up to 8,000 bytes.
_MAX_CHARS = 2000


def copy_amendments(client: MlflowClient, mlflow_run_id: str, run: RunPaths, new: list[Event]) -> None:
    """Set the tags as the whole journal describes them, if one of the new events changes them."""
    if not any(event["kind"] in _KINDS for event in new):
        return
    for key, course in courses(read_state(run).amendments).items():
        client.set_tag(mlflow_run_id, f"{_PREFIX}{key}", hide(course)[-_MAX_CHARS:])


def courses(amendments: list[AmendmentState]) -> dict[str, str]:
    """Return the values of each amended key in order: ``0.0003; from step 1201: 0.0001; pending: 5e-05``."""
    texts: dict[str, str] = {}
    for amendment in amendments:
        begins = "pending" if amendment.applied_step is None else f"from step {amendment.applied_step + 1}"
        for key, (old, new) in amendment.changes.items():
            texts[key] = f"{texts.get(key, old)}; {begins}: {new}"
    return texts
