"""Answers of a Kubernetes API server to the requests that the launcher, kubectl and the nodes of a lab make.

``python -m tests.kubernetes.answers`` asks a real control plane, whose programs must be on the PATH, and records
its answers in ``answers.json``. ``test_answers.py`` asks the stand-in the same. Nothing asks for watches.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kubernetes.control_plane import PROGRAMS, missing
from tests.kubernetes.kubelets import Client
from tests.kubernetes.lab import DRIVER, WHICH, Lab
from tests.waiting import wait_for

Object = dict[str, Any]
RECORDED = Path(__file__).with_name("answers.json")
_JOBS, _PODS = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"
_SERVICES, _EVENTS = "/api/v1/namespaces/default/services", "/api/v1/namespaces/default/events"
_LABELS = {"app.kubernetes.io/managed-by": "hlatctl"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
#: The random end of a pod's or an event's name, after the index of the pod.
_RANDOM = re.compile(r"(-\d)-[a-z0-9]{5}(\.[0-9a-f]+)?\b")
_NODE = re.compile(r"n[1-4]")
#: Values that differ each time.
_CHANGING = {"uid": "UID", "controller-uid": "UID", "batch.kubernetes.io/controller-uid": "UID"}
_CHANGING |= {
    "resourceVersion": "VERSION",
    "clusterIP": "ADDRESS",
    "clusterIPs": "ADDRESS",
    "reportingInstance": "SCHEDULER",
}


def job(name: str, script: str, **spec: object) -> Object:
    """A Job of two pods, as the launcher's."""
    container = {"name": "node", "image": "image", "command": ["/bin/sh", "-c"], "args": [script]}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "subdomain": name, "containers": [container]}
    pod["nodeSelector"] = spec.pop("nodes", {})
    common = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0}
    template = {"metadata": {"labels": _LABELS}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {**_LABELS, "hlatctl/token": name}},
        "spec": {**common, "podReplacementPolicy": "Failed", "template": template, **spec},
    }


class Asked:
    """Asks a server, and keeps the answers that have a name.

    Args:
        client: the administrator's.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.answers: dict[str, Object] = {}

    def ask(self, name: str, method: str, path: str, body: Object | None = None, *, token: str = "") -> Object:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            f"{self._client.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token or self._client.token}", "Content-Type": kind},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=ssl._create_unverified_context()) as answer:
                code, found = answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            code, found = error.code, json.loads(error.read())
        if name:
            self.answers[name] = {"code": code, "body": normalised(found)}
        return dict(found)

    def until(self, name: str, path: str, done: Callable[[Object], bool]) -> Object:
        """Ask until an answer fulfils a condition; keep that one."""
        wait_for(lambda: done(self.ask("", "GET", path)))
        return self.ask(name, "GET", path)


def normalised(value: Any, key: str = "") -> Any:
    """Return an answer without what differs each time: ids, times, versions, random names and places."""
    if key in _CHANGING and value != "None":
        return _CHANGING[key]
    if isinstance(value, dict):
        return {name: normalised(one, name) for name, one in sorted(value.items()) if name != "managedFields"}
    if isinstance(value, list):
        return [normalised(one) for one in value]
    if not isinstance(value, str):
        return value
    text = _RANDOM.sub(r"\1-RANDOM", _TIME.sub("TIME", value))
    return _NODE.sub("NODE", text) if key in ("nodeName", "host") else text


def has(one: Object, kind: str, reason: str = "") -> bool:
    """Whether a condition of an object is met, for this reason."""
    found = one.get("status", {}).get("conditions") or []
    return any(each["type"] == kind and each.get("reason", "").startswith(reason) for each in found)


def all_answers(lab: Lab) -> dict[str, Object]:
    """Ask everything; return the answers by name. The cluster is idle before and after."""
    asked, others = Asked(lab.server.client()), lab.server.client(DRIVER)
    _refusals(asked, others.token)
    _suspended_and_unschedulable(asked)
    _running_and_deleted(asked, lab)
    for name, script in (("fails", "exit 3"), ("succeeds", "exit 0")):
        asked.ask("", "POST", _JOBS, job(name, script))
        asked.until(f"job that {name}", f"{_JOBS}/{name}", lambda one: has(one, "Failed") or has(one, "Complete"))
        # At least 1: a job that has failed removes a pod that had not ended.
        _first_pod(asked, name, f"pod that {name}", _has_ended, least=1)
        asked.ask("", "DELETE", f"{_JOBS}/{name}", {"propagationPolicy": "Background"})
    return asked.answers


def _refusals(asked: Asked, other: str) -> None:
    asked.ask("no such job", "GET", f"{_JOBS}/nothing")
    asked.ask("delete no such job", "DELETE", f"{_JOBS}/nothing")
    asked.ask("no such kind", "GET", "/apis/batch/v1/namespaces/default/nothings")
    asked.ask("no such namespace", "POST", _JOBS.replace("default", "nowhere"), job("any", "exit 0"))
    asked.ask("unknown token", "GET", _JOBS, token="nobody")
    asked.ask("right in a namespace", "GET", _JOBS, token=other)
    asked.ask("right to create", "POST", _JOBS, job("any", "exit 0"), token=other)
    asked.ask("right in the cluster", "GET", "/api/v1/nodes", token=other)
    asked.ask("right to delete a pod", "DELETE", f"{_PODS}/any", token=other)


def _suspended_and_unschedulable(asked: Asked) -> None:
    selector = {"batch.kubernetes.io/job-name": "waits"}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    body = {"metadata": {"name": "waits", "labels": _LABELS}, "spec": service}
    asked.ask("create a service", "POST", _SERVICES, {"apiVersion": "v1", "kind": "Service", **body})
    work = job("waits", "exit 0", suspend=True, nodes={"kubernetes.io/hostname": "nowhere"})
    created = asked.ask("create a job", "POST", _JOBS, work)
    asked.ask("create it again", "POST", _JOBS, work)
    asked.until("suspended job", f"{_JOBS}/waits", lambda one: has(one, "Suspended", "JobSuspended"))
    asked.ask("list by a label", "GET", f"{_JOBS}?labelSelector=hlatctl/token%3Dwaits")
    asked.ask("list by another label", "GET", f"{_JOBS}?labelSelector=hlatctl/token%3Dother")
    asked.ask("list by two labels", "GET", f"{_JOBS}?labelSelector=hlatctl/token%3Dwaits,hlatctl/run")
    old = {"metadata": {"resourceVersion": created["metadata"]["resourceVersion"]}, "spec": {"suspend": False}}
    asked.ask("change an old version", "PATCH", f"{_JOBS}/waits", old)
    asked.ask("resume", "PATCH", f"{_JOBS}/waits", {"spec": {"suspend": False}})
    asked.until("resumed job", f"{_JOBS}/waits", lambda one: one.get("status", {}).get("active") == 2)
    pod = _first_pod(asked, "waits", "pod without a node", lambda one: has(one, "PodScheduled", "Unschedulable"))
    asked.until("event", f"{_EVENTS}?fieldSelector=involvedObject.name%3D{pod}", lambda one: bool(one["items"]))
    asked.ask("delete a service", "DELETE", f"{_SERVICES}/waits", {"propagationPolicy": "Background"})
    asked.ask("delete a waiting job", "DELETE", f"{_JOBS}/waits", {"propagationPolicy": "Background"})
    wait_for(lambda: not asked.ask("", "GET", _pods("waits"))["items"])


def _running_and_deleted(asked: Asked, lab: Lab) -> None:
    # It ignores the request to end, so that it is still there to look at.
    asked.ask("", "POST", _JOBS, job("runs", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"))
    pod = _first_pod(asked, "runs", "running pod", lambda one: one["status"]["phase"] == "Running")
    asked.until("running job", f"{_JOBS}/runs", lambda one: one.get("status", {}).get("active") == 2)
    wait_for(lambda: lab.nodes.printed.count("deaf") == 2)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
    asked.ask("evict", "POST", f"{_PODS}/{pod}/eviction", eviction)
    asked.ask("evicted pod", "GET", f"{_PODS}/{pod}")
    wait_for(lambda: asked.ask("", "GET", f"{_JOBS}/runs")["status"].get("terminating") == 1)
    asked.ask("delete in the foreground", "DELETE", f"{_JOBS}/runs", {"propagationPolicy": "Foreground"})
    deleted = "job that is deleted in the foreground"
    asked.until(deleted, f"{_JOBS}/runs", lambda one: one["status"].get("terminating") == 2)
    other = next(
        one["metadata"]["name"]
        for one in asked.ask("", "GET", _pods("runs"))["items"]
        if one["metadata"]["name"] != pod
    )
    asked.ask("delete a pod with its grace", "DELETE", f"{_PODS}/{other}", {"gracePeriodSeconds": 3})
    for name in (pod, other):
        asked.ask("", "DELETE", f"{_PODS}/{name}", {"gracePeriodSeconds": 0})
    asked.until("job that was deleted", f"{_JOBS}/runs", lambda one: one["kind"] == "Status")


def _pods(name: str) -> str:
    return f"{_PODS}?labelSelector=batch.kubernetes.io/job-name%3D{name}"


def _has_ended(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Failed", "Succeeded")


def _first_pod(asked: Asked, job_name: str, name: str, done: Callable[[Object], bool], least: int = 2) -> str:
    """Keep a job's first pod once all its pods, at least so many, fulfil a condition; return the pod's name."""
    path, pods = _pods(job_name), list[Object]()

    def all_are() -> bool:
        pods[:] = asked.ask("", "GET", path)["items"]
        return len(pods) >= least and all(map(done, pods))

    wait_for(all_are)
    first = min(one["metadata"]["name"] for one in pods)
    asked.ask(name, "GET", f"{_PODS}/{first}")
    return str(first)


def main() -> None:
    """Record the answers of a real control plane.

    Raises:
        SystemExit: its programs are not here.
    """
    if missing():
        raise SystemExit(f"error: needs {', '.join(PROGRAMS)} on the PATH; there is no {', '.join(missing())}")
    os.environ[WHICH] = "real"
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        os.environ.update(lab.env)
        try:
            lab.start()
            answers = all_answers(lab)
        finally:
            lab.stop()
    RECORDED.write_text(f"{json.dumps(answers, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
