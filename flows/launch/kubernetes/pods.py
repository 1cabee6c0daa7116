"""The state of a job on a Kubernetes cluster: whether its pods wait, run or have ended, on which nodes, and why.

The Job's own status is not used: a pod on a node that can't be reached never ends, and its Job waits forever
(kubernetes/enhancements#6262). How a job has ended follows from its pods and the records in the run directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from conf.schema import KubernetesConfig
from flows.launch.base import Verdict
from flows.launch.endings import NodeRecord
from flows.launch.kubernetes.manifest import INDEX
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.files import DAMAGED

Fields = Mapping[str, Any]
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
        rank: rank of its node in the job.
        host: name of its node; empty until it has one.
        phase: the cluster's term for its phase.
        reason: why it waits or how it ended, with the message of the cluster; may be empty.
        verdict: how it ended, in the cluster's view.
        deleting: it was asked to end.
        started: its program runs or has run.
        exit_code: exit code of its program.
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


def pod_of(value: Fields) -> Pod:
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


def _reason(disrupted: Fields, status: Fields, scheduled: Fields, waits: Fields) -> str:
    """Return the first known reason: a disruption, the pod's end, its place in the queue, its start."""
    unscheduled = scheduled if scheduled.get("status") == "False" else {}
    for one in (disrupted, status, unscheduled, waits):
        if one.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            return ": ".join(filter(None, (one["reason"], (one.get("message") or "").strip())))
    return ""


def is_ready(node: Fields) -> bool:
    """Return whether a node answers the cluster."""
    conditions = {one["type"]: one["status"] for one in node.get("status", {}).get("conditions") or []}
    return conditions.get("Ready") == "True"


def is_usable(node: Fields, settings: KubernetesConfig) -> bool:
    """Return whether new pods of a job may be placed on a node, by its labels, its taints and its state.

    Karpenter and the node termination handler taint a node that will be taken back.
    """
    labels, spec = node["metadata"].get("labels") or {}, node.get("spec", {})
    matches = all(labels.get(key) == value for key, value in settings.node_selector.items())
    taints = [taint for taint in spec.get("taints") or [] if taint.get("effect") in ("NoSchedule", "NoExecute")]
    tolerated = all(taint["key"] in settings.tolerations for taint in taints)
    return is_ready(node) and matches and tolerated and not spec.get("unschedulable")


def newest_event(events: Sequence[Fields]) -> str:
    """Return the newest warning about an object, such as a volume that can't be mounted; empty if there is none."""
    warnings = [one for one in events if one.get("type") == "Warning"]
    newest = max(warnings, key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "", default=None)
    return f"{newest['reason']}: {newest.get('message', '').strip()}" if newest else ""


def unix_s(text: str) -> float:
    """Return a time of the cluster as Unix seconds."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


Object = dict[str, Any]


class Seen:
    """What the cluster has of a job.

    Args:
        work: the Job; None: there is none.
        lost: pods on nodes that don't answer, after the cluster has asked them to end.
        gone: vanished pods that had reported why they were ended.
    """

    def __init__(self, work: Object | None, pods: list[Pod], lost: list[Pod], gone: list[Pod]) -> None:
        self.work, self.pods, self.lost = work, pods, lost
        self.time_s, self.took_s = time.monotonic(), 0.0
        now = {pod.name: pod for pod in (*gone, *pods) if pod.verdict}
        self.disrupted = sorted(now.values(), key=lambda pod: pod.rank)

    @property
    def name(self) -> str:
        """The Job's name."""
        return str(self.work["metadata"]["name"]) if self.work else ""

    @property
    def version(self) -> str:
        """The Job's version."""
        return version_of(self.work) if self.work else ""

    @property
    def exists(self) -> bool:
        """Whether the cluster still has anything of the job."""
        return self.work is not None or bool(self.pods)

    @property
    def alive(self) -> bool:
        """Whether the Job was not asked to end."""
        return self.work is not None and "deletionTimestamp" not in self.work["metadata"]

    @property
    def suspended(self) -> bool:
        """Whether the Job waits to be admitted."""
        return bool(self.work and self.work["spec"].get("suspend"))

    @property
    def failed(self) -> bool:
        """Whether a pod or the Job has failed: its other pods are being ended."""
        conditions = (self.work or {}).get("status", {}).get("conditions") or []
        over = any(one["type"] in ("Failed", "FailureTarget") and one["status"] == "True" for one in conditions)
        return over or self.work is None or not self.alive or any(pod.phase == "Failed" for pod in self.pods)


def version_of(one: Object) -> str:
    """Return the version of an object, which changes with each change of it."""
    return str(one["metadata"]["resourceVersion"])


def all_good(records: list[NodeRecord], nodes: int) -> bool:
    """Return whether all nodes have ended well."""
    return len(records) == nodes and all(record.code == 0 for record in records)


def code_of(pods: list[Pod], records: list[NodeRecord], nodes: int) -> int | None:
    """Return the exit code of a whole job: 0 only if all of its nodes have ended well."""
    codes = [pod.exit_code for pod in pods if pod.exit_code is not None]
    failed = next((code for code in codes if code), None)
    return failed if failed is not None else 0 if len(codes) == nodes or all_good(records, nodes) else None


def was_asked(records: list[NodeRecord]) -> bool:
    """Return whether the first node that ended was asked to. After a failure, the cluster asks the others."""
    ended = [record for record in records if record.code is not None]
    return bool(ended) and min(ended, key=lambda record: record.ended_unix_s).asked_to_stop


def is_ours(base: Path) -> bool:
    """Return whether a driver has asked the job to stop or to end."""
    return ordered(base) in ("stop", "end")


def ordered(base: Path) -> str:
    """Return the newest order to the nodes; empty if there is none."""
    try:
        return str(files.read_json(node.orders(base)).get("what"))
    except (OSError, *DAMAGED):
        return ""


def nodes_of(base: Path) -> int:
    """Return the number of a job's nodes, from its manifest."""
    try:
        work = list(yaml.safe_load_all(base.with_name(f"{base.name}.yaml").read_text(encoding="utf-8")))[-1]
        return int(work["spec"]["completions"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError):
        return 1
