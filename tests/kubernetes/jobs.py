"""The stand-in's Job controller: Indexed Jobs with ``podReplacementPolicy: Failed``, as Kubernetes 1.36 treats them."""

from __future__ import annotations

import copy
import uuid

from tests.kubernetes.store import Object, Store, condition, has, now

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
