"""What the pods of a job say: whether they wait, run or have ended, on which nodes, and why.

The Job itself is not asked: a pod on a node that can't be reached never ends, and its Job waits for ever
(kubernetes/enhancements#6262).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flows.launch.base import Verdict
from flows.launch.kubernetes.manifest import INDEX

Object = Mapping[str, Any]
#: Reasons of the condition DisruptionTarget (Kubernetes, "Pod disruption conditions").
_DISRUPTIONS: dict[str, Verdict] = {
    "DeletionByPodGC": "node_failed",
    "DeletionByTaintManager": "node_failed",
    "EvictionByEvictionAPI": "preempted",
    "PreemptionByScheduler": "preempted",
    "TerminationByKubelet": "node_failed",
}
_OUT_OF_MEMORY = "OOMKilled"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod of a job.

    Args:
        name: of the pod.
        rank: of its node in the job.
        host: name of its node; empty as long as it has none.
        phase: in the cluster's words.
        reason: why it waits or how it ended, with the message of the cluster; may be empty.
        verdict: how it ended, in the cluster's view.
        deleting: it was asked to end.
        started: its program ran, or runs.
        exit_code: of its program.
    """

    name: str
    rank: int
    host: str
    phase: str
    reason: str = ""
    verdict: Verdict = ""
    deleting: bool = False
    started: bool = False
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether its program has ended."""
        return self.phase in ("Succeeded", "Failed")


def pod_of(value: Object) -> Pod:
    """Return a pod from the cluster's JSON."""
    metadata, status = value["metadata"], value.get("status", {})
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state", {})
    ended, waits = state.get("terminated", {}), state.get("waiting", {})
    conditions = {one["type"]: one for one in status.get("conditions") or [] if one.get("status") in ("True", "False")}
    disrupted = conditions.get("DisruptionTarget", {})
    verdict: Verdict = _DISRUPTIONS.get(disrupted.get("reason", ""), "") if disrupted.get("status") == "True" else ""
    if ended.get("reason") == _OUT_OF_MEMORY:
        verdict = "out_of_memory"
    return Pod(
        name=metadata["name"],
        rank=int((metadata.get("annotations") or {}).get(INDEX, 0)),
        host=value.get("spec", {}).get("nodeName") or "",
        phase=status.get("phase", "Pending"),
        reason=_reason(disrupted, status, conditions.get("PodScheduled", {}), waits),
        verdict=verdict,
        deleting="deletionTimestamp" in metadata,
        started=bool(ended or state.get("running")),
        exit_code=ended.get("exitCode"),
    )


def _reason(disrupted: Object, status: Object, scheduled: Object, waits: Object) -> str:
    """Return the first that says something: a disruption, the pod's end, its place in the queue, its start."""
    unscheduled = scheduled if scheduled.get("status") == "False" else {}
    for one in (disrupted, status, unscheduled, waits):
        if one.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            return ": ".join(filter(None, (one["reason"], (one.get("message") or "").strip())))
    return ""


def is_ready(node: Object) -> bool:
    """Whether a node answers the cluster."""
    conditions = {one["type"]: one["status"] for one in node.get("status", {}).get("conditions") or []}
    return conditions.get("Ready") == "True"


def is_usable(node: Object, selector: Mapping[str, str]) -> bool:
    """Whether new pods of a job may be placed on a node, as far as labels and its state tell."""
    labels = node["metadata"].get("labels") or {}
    matches = all(labels.get(key) == value for key, value in selector.items())
    return is_ready(node) and matches and not node.get("spec", {}).get("unschedulable")


def newest_event(events: Sequence[Object]) -> str:
    """Return the newest warning about an object, such as a volume that can't be mounted; empty if there is none."""
    warnings = [one for one in events if one.get("type") == "Warning"]
    newest = max(warnings, key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "", default=None)
    return f"{newest['reason']}: {newest.get('message', '').strip()}" if newest else ""


def unix_s(text: str) -> float:
    """Return a time of the cluster in seconds."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
