"""What the stand-in's cluster does by itself: jobs, placement, lost nodes and garbage, as Kubernetes' own controllers.

Jobs are Indexed Jobs with ``podReplacementPolicy: Failed``. Placement has the filters that our pods can meet.

They know what the launcher's objects ask for, and no more. Messages and reasons are those of Kubernetes 1.36.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections import Counter, defaultdict
from datetime import datetime
from typing import Any

from tests.kubernetes.store import FOREGROUND, Object, Store, condition, has, now

_TICK_S = 0.05
_UNREACHABLE = "node.kubernetes.io/unreachable"


class Controllers:
    """All controllers, in one thread.

    Args:
        store: holds the objects.
        silence: a node is unreachable if another one has renewed its lease so often since it has. A clock would count
            the pauses of a loaded machine too, in which no node can renew its lease.
    """

    def __init__(self, store: Store, silence: int) -> None:
        self._store, self._silence, self._jobs = store, silence, Jobs(store)
        self._renewed: dict[str, str] = {}
        self._others: dict[str, Counter[str]] = defaultdict(Counter)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def forgive(self) -> None:
        """Count every node's silence anew: nobody could renew a lease while the server was away."""
        with self._store.lock:
            self._others.clear()

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            with self._store.lock:
                self._collect_garbage()
                for node in self._store.of("nodes"):
                    self._watch_node(node)
                for job in self._store.of("jobs"):
                    self._jobs.turn(job)
                for pod in self._store.of("pods"):
                    self._follow(pod)
                for claim in self._store.of("persistentvolumeclaims"):
                    self._bind(claim)

    def _collect_garbage(self) -> None:
        """Delete what has lost its owner, and before an owner that is deleted in the foreground what it owns."""
        everything = [(kind, one) for kind in ("jobs", "pods", "services") for one in self._store.of(kind)]
        uids = {one["metadata"]["uid"] for _, one in everything}
        last = {one["metadata"]["uid"] for _, one in everything if FOREGROUND in one["metadata"].get("finalizers", [])}
        owned: set[str] = set()
        for kind, one in everything:
            own = owners(one)
            owned |= own
            if own and (not own & uids or own & last) and "deletionTimestamp" not in one["metadata"]:
                self._store.delete(kind, one)
            if own and not own & uids:
                release(self._store, kind, one, TRACKING)
        for kind, one in everything:
            if one["metadata"]["uid"] in last - owned:
                release(self._store, kind, one, FOREGROUND)

    def _watch_node(self, node: Object) -> None:
        name = node["metadata"]["name"]
        lease = self._store.find("leases", "kube-node-lease", name)
        renewed = (lease or {}).get("spec", {}).get("renewTime", "")
        if self._renewed.get(name) != renewed:
            self._renewed[name] = renewed
            for other, renewals in self._others.items():
                renewals[name] += other != name
            self._others[name].clear()
        silence = max(self._others[name].values(), default=0)
        if silence >= self._silence and not has(node, "Ready", "Unknown"):
            message = "Kubelet stopped posting node status."
            condition(node, "Ready", "Unknown", "NodeStatusUnknown", message)
            self._store.put("nodes", node)
        spec = node.setdefault("spec", {})
        others = [taint for taint in spec.get("taints", []) if taint["key"] != _UNREACHABLE]
        taints = [{"key": _UNREACHABLE, "effect": effect, "timeAdded": now()} for effect in ("NoSchedule", "NoExecute")]
        if has(node, "Ready", "Unknown") != (len(others) < len(spec.get("taints", []))):
            spec["taints"] = others + (taints if has(node, "Ready", "Unknown") else [])
            if not spec["taints"]:
                del spec["taints"]
            self._store.put("nodes", node)

    def _follow(self, pod: Object) -> None:
        """Place a pod, or end one whose node is gone or unreachable for longer than it tolerates."""
        where = pod["spec"].get("nodeName")
        if not where:
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            else:
                place(self._store, pod)
            return
        node = self._store.find("nodes", "", where)
        if node is None:
            disrupt(self._store, pod, "DeletionByPodGC", "PodGC: node no longer exists")
            self._end(pod)
        elif "deletionTimestamp" in pod["metadata"] or pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        elif any(_is_over(pod, taint) for taint in node["spec"].get("taints", [])):
            disrupt(self._store, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
            self._store.delete("pods", pod)

    def _end(self, pod: Object) -> None:
        """End a pod that no node can end; the Job that counts pods may hold it for a moment."""
        if pod["status"].get("phase") != "Failed" or pod["metadata"].get("deletionGracePeriodSeconds") != 0:
            pod["status"]["phase"] = "Failed"
            self._store.delete("pods", pod, grace_s=0)

    def _bind(self, claim: Object) -> None:
        volume = self._store.find("persistentvolumes", "", claim["spec"].get("volumeName", ""))
        phase = "Bound" if volume else "Pending"
        if claim.setdefault("status", {}).get("phase") != phase:
            claim["status"]["phase"] = phase
            self._store.put("persistentvolumeclaims", claim)


def disrupt(store: Store, pod: Object, reason: str, message: str) -> None:
    """Say why a pod is taken away."""
    if condition(pod, "DisruptionTarget", "True", reason, message):
        store.put("pods", pod)


def _is_over(pod: Object, taint: Object) -> bool:
    """Whether a pod no longer tolerates a taint that ends pods."""
    if taint["effect"] != "NoExecute":
        return False
    matching = [one for one in pod["spec"].get("tolerations", []) if tolerates(one, taint)]
    if not matching:
        return True
    limits = [one["tolerationSeconds"] for one in matching if "tolerationSeconds" in one]
    added_s = datetime.fromisoformat(taint["timeAdded"].replace("Z", "+00:00")).timestamp()
    return bool(limits) and time.time() - added_s >= min(limits)


#: A pod with this finalizer was not counted yet.
TRACKING = "batch.kubernetes.io/job-tracking"
_INDEX = "batch.kubernetes.io/job-completion-index"
_ENDED = ("Succeeded", "Failed")


class Jobs:
    """Creates the pods of jobs, counts how they end, and ends the others when one has failed.

    Args:
        store: holds the objects.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        #: By a job's uid, and by a pod's: the pod's index and how it ended. The pod itself may be gone.
        self._counted: dict[str, dict[str, tuple[str, str]]] = {}

    def turn(self, job: Object) -> None:
        before = copy.deepcopy(job)
        over, deleting = any(has(job, kind) for kind in ("Complete", "Failed")), "deletionTimestamp" in job["metadata"]
        if not over:
            self._advance(job, deleting=deleting)
        for pod in self._pods(job):
            if over or deleting or pod["status"].get("phase") in _ENDED:
                release(self._store, "pods", pod, TRACKING)
        if job != before:
            self._store.put("jobs", job)

    def _pods(self, job: Object) -> list[Object]:
        uid, pods = job["metadata"]["uid"], self._store.of("pods", job["metadata"]["namespace"])
        return [pod for pod in pods if uid in owners(pod)]

    def _advance(self, job: Object, *, deleting: bool) -> None:
        spec, status, pods = job["spec"], job.setdefault("status", {}), self._pods(job)
        counted = self._counted.setdefault(job["metadata"]["uid"], {})
        for pod in pods:
            if pod["status"].get("phase") in _ENDED:
                counted[pod["metadata"]["uid"]] = (pod["metadata"]["annotations"][_INDEX], pod["status"]["phase"])
        good = {index for index, phase in counted.values() if phase == "Succeeded"}
        failed = sum(phase == "Failed" for _, phase in counted.values())
        live = [pod for pod in pods if pod["metadata"]["uid"] not in counted]
        active = [pod for pod in live if "deletionTimestamp" not in pod["metadata"]]
        if deleting:
            pass  # its pods are only counted
        elif failed > spec["backoffLimit"]:
            self._delete(active)
            _fail(job, done=not live)
        elif spec.get("suspend"):
            self._delete(active)
            condition(job, "Suspended", "True", "JobSuspended", "Job suspended")
        elif len(good) == spec["completions"]:
            _complete(job)
        else:
            self._fill(job, good | {pod["metadata"]["annotations"][_INDEX] for pod in live})
        active_pods, terminating = len(active), len(live) - len(active)
        status.update(active=active_pods, terminating=terminating, succeeded=len(good), failed=failed)

    def _delete(self, pods: list[Object]) -> None:
        for pod in pods:
            self._store.delete("pods", pod)

    def _fill(self, job: Object, taken: set[str]) -> None:
        """Create the pods of the indexes that have none."""
        if has(job, "Suspended"):
            condition(job, "Suspended", "False", "JobResumed", "Job resumed")
        job["status"].setdefault("startTime", now())
        for index in range(job["spec"]["completions"]):
            if str(index) not in taken:
                self._store.create("pods", job["metadata"]["namespace"], pod_of(job, index))


def _fail(job: Object, *, done: bool) -> None:
    for kind in ("FailureTarget", *(("Failed",) if done else ())):
        condition(job, kind, "True", "BackoffLimitExceeded", "Job has reached the specified backoff limit")


def _complete(job: Object) -> None:
    for kind in ("SuccessCriteriaMet", "Complete"):
        condition(job, kind, "True", "CompletionsReached", "Reached expected number of succeeded pods")
    job["status"]["completionTime"] = now()


def pod_of(job: Object, index: int) -> Object:
    meta, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
    names = {"job-name": meta["name"], "controller-uid": meta["uid"]}
    labels = {**names, **{f"batch.kubernetes.io/{key}": value for key, value in names.items()}, _INDEX: str(index)}
    own: Object = template.get("metadata", {})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    for container in template["spec"]["containers"]:
        own_index = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{_INDEX}']"}}
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": own_index})
    return {
        "metadata": {
            "name": f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}",
            "labels": {**own.get("labels", {}), **labels},
            "annotations": {**own.get("annotations", {}), _INDEX: str(index)},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            "finalizers": [TRACKING],
        },
        "spec": {**template["spec"], "hostname": f"{meta['name']}-{index}"},
        "status": {"phase": "Pending"},
    }


def owners(one: Object) -> set[str]:
    return {owner["uid"] for owner in one["metadata"].get("ownerReferences", [])}


def release(store: Store, kind: str, one: Object, finalizer: str) -> None:
    """Remove a finalizer, which may let the object go."""
    held = one["metadata"].get("finalizers", [])
    if finalizer in held:
        one["metadata"]["finalizers"] = [each for each in held if each != finalizer]
        store.put(kind, one)


_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def place(store: Store, pod: Object) -> None:
    """Give a pod its node, or say why there is none."""
    nodes, why = list(store.of("nodes")), Counter[str]()
    claims = _claims(store, pod)
    for node in nodes if not claims else []:
        refusals = _refusals(store, pod, node)
        if not refusals:
            pod["spec"]["nodeName"] = node["metadata"]["name"]
            condition(pod, "PodScheduled", "True", "", "")
            store.put("pods", pod)
            return
        why[refusals[0]] += 1
    reasons = [claims] if claims else [f"{count} {reason}" for reason, count in sorted(why.items())]
    message = f"0/{len(nodes)} nodes are available: {', '.join(reasons)}."
    if condition(pod, "PodScheduled", "False", "Unschedulable", message):
        store.put("pods", pod)
        _tell(store, pod, message)


def _tell(store: Store, pod: Object, message: str) -> None:
    meta = pod["metadata"]
    about = {"kind": "Pod", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
    event = {
        "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:12]}"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": message,
        "eventTime": now(),
    }
    store.create("events", meta["namespace"], event)


def _claims(store: Store, pod: Object) -> str:
    """Return what is wrong with the claims of a pod."""
    for volume in pod["spec"].get("volumes", []):
        name = volume.get("persistentVolumeClaim", {}).get("claimName")
        claim = store.find("persistentvolumeclaims", pod["metadata"]["namespace"], name) if name else {}
        if claim is None:
            return f'persistentvolumeclaim "{name}" not found'
        if name and claim.get("status", {}).get("phase") != "Bound":
            return "pod has unbound immediate PersistentVolumeClaims"
    return ""


def _refusals(store: Store, pod: Object, node: Object) -> list[str]:
    """Return why a node is not for a pod, in the words of the scheduler."""
    spec = pod["spec"]
    here = [
        one
        for one in store.of("pods")
        if one["spec"].get("nodeName") == node["metadata"]["name"] and one["status"].get("phase") not in _ENDED
    ]
    refusals = ["node(s) were unschedulable"] if node["spec"].get("unschedulable") else []
    untolerated = (
        taint
        for taint in node["spec"].get("taints", [])
        if not any(tolerates(one, taint) and "tolerationSeconds" not in one for one in spec.get("tolerations", []))
    )
    refusals += [f"node(s) had untolerated taint(s) {taint['key']}" for taint in untolerated]
    if not has(node, "Ready") and not refusals:
        refusals.append("node(s) were not ready")
    if not _matches(spec, node):
        refusals.append("node(s) didn't match Pod's node affinity/selector")
    affinity = spec.get("affinity", {}).get("podAntiAffinity", {})
    for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        labels = term["labelSelector"]["matchLabels"].items()
        if any(labels <= (one["metadata"].get("labels") or {}).items() for one in here):
            refusals.append("node(s) didn't match pod anti-affinity rules")
    room = node.get("status", {}).get("allocatable", {})
    wanted = _wanted(pod)
    used = sum((_wanted(one) for one in here), Counter[str]())
    refusals += [f"Insufficient {key}" for key in wanted if used[key] + wanted[key] > amount(room.get(key, "0"))]
    return refusals


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether a toleration is one of this taint."""
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    same_key = toleration.get("key") in (None, taint["key"])
    return same_key and same_value and toleration.get("effect") in (None, taint["effect"])


def _matches(spec: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    if not spec.get("nodeSelector", {}).items() <= labels.items():
        return False
    affinity: Object = spec.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return terms is None or any(all(_fulfils(one, node) for one in term["matchFields"]) for term in terms)


def _fulfils(requirement: Object, node: Object) -> bool:
    """A field takes one value, and only the name is one (Kubernetes' validation of ``matchFields``)."""
    (value,) = requirement["values"]
    same: bool = node["metadata"]["name"] == value
    wanted: bool = requirement["operator"] == "In"
    return same == wanted


def _wanted(pod: Object) -> Counter[str]:
    """Return what a pod asks for; limits count where nothing else is said."""
    total = Counter[str](pods=1)
    for container in pod["spec"]["containers"]:
        given: dict[str, Any] = container.get("resources", {})
        for key, value in {**given.get("limits", {}), **given.get("requests", {})}.items():
            total[key] += amount(str(value))
    return total


def amount(text: str) -> int:
    """Return a quantity in thousandths."""
    digits = text.rstrip("kMGTim")
    unit = text[len(digits) :]
    return int(float(digits)) if unit == "m" else int(float(digits) * _UNITS[unit] * 1000)
