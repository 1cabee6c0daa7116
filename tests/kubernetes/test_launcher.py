"""What a Kubernetes cluster does to a job, and what the launcher says and does then."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.base import Handle, Job, Status
from flows.launch.kubernetes.api import RefusedError
from flows.launch.kubernetes.launcher import KubernetesLauncher
from flows.launch.kubernetes.manifest import RUN_LABEL
from hlatctl.run.errors import ConfigError
from tests.flows.launch.contract import DEAF, SLEEPS, end_of, python_job, submit
from tests.kubernetes.control_plane import write_kubeconfig
from tests.kubernetes.lab import DRIVER, NODES, Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

#: Does not end when it is asked to, and says that it lives.
WRITES = f"{DEAF.rpartition('time.sleep')[0]}\nwhile True: print('alive', flush=True); time.sleep(0.1)"
SETTINGS: dict[str, object] = {"image": "none", "python": sys.executable, "grace_s": 3, "lost_after_s": 1}


def a_launcher(**settings: object) -> KubernetesLauncher:
    kubernetes = KubernetesConfig(**{**SETTINGS, **settings})  # type: ignore[arg-type]
    return KubernetesLauncher(ClusterConfig(launcher="kubernetes", nodes=2, kubernetes=kubernetes))


@pytest.fixture(autouse=True)
def idle(lab: Lab) -> Iterator[None]:
    # A program that another test left behind would never end on a node that this one cuts off.
    wait_for(lambda: not any(map(lab.nodes.is_busy, lab.nodes.nodes)))
    yield
    lab.clear()


def running(launcher: KubernetesLauncher, job: Job) -> tuple[Handle, tuple[str, ...]]:
    """Start a job; return its handle and its hosts once it runs on all of them. Each node says once that it started."""
    handle = submit(launcher, job)
    wait_for(lambda: job.log.read_text().count("started") == job.nodes)
    wait_for(lambda: launcher.status(handle).state == "running")
    return handle, launcher.status(handle).hosts


def queued(launcher: KubernetesLauncher, handle: Handle, says: str) -> None:
    wait_for(lambda: says in launcher.status(handle).reason or launcher.status(handle).ended)
    status = launcher.status(handle)
    assert (status.state, says in status.reason) == ("queued", True), status


def pods(lab: Lab) -> list[str]:
    return lab.kubectl("get", "pods", "--output=name").split()


def test_a_half_dead_node_writes_nothing_after_the_job_has_ended(lab: Lab, tmp_path: Path) -> None:
    launcher, job = a_launcher(), python_job(tmp_path, WRITES, nodes=2)
    handle, hosts = running(launcher, job)
    lab.nodes.isolate(hosts[0])
    status = end_of(launcher, handle)
    assert (status.verdict, status.blamed_hosts) == ("node_failed", hosts[:1])
    written = job.log.read_text()
    wait_for(lambda: not any(lab.nodes.is_busy(host) for host in hosts))  # the node's program itself ends last
    assert job.log.read_text() == written, "it obeyed the order in the file"
    launcher.cancel(handle, grace_s=0)
    assert not pods(lab)


def test_a_half_dead_node_has_ended_its_processes_when_a_cancel_returns(lab: Lab, tmp_path: Path) -> None:
    launcher, job = a_launcher(), python_job(tmp_path, WRITES, nodes=2)
    handle, hosts = running(launcher, job)
    lab.nodes.isolate(hosts[0])
    wait_for(lambda: hosts[0] not in a_launcher().hosts(2))
    launcher.cancel(handle, grace_s=0)
    assert not any(lab.nodes.is_busy(host) for host in hosts)
    assert launcher.status(handle).ended


@pytest.mark.parametrize(
    ("code", "reason"), [(WRITES, "EvictionByEvictionAPI: Eviction API: evicting"), (SLEEPS, "a pod was asked to end")]
)
def test_an_evicted_pod_ends_the_job_as_preempted_also_if_it_is_gone(
    lab: Lab, tmp_path: Path, code: str, reason: str
) -> None:
    launcher, job = a_launcher(), python_job(tmp_path, code, nodes=2)
    handle, _ = running(launcher, job)
    pod = pods(lab)[0].removeprefix("pod/")
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
    lab.server.client().ask("POST", f"/api/v1/namespaces/default/pods/{pod}/eviction", body)
    if code == SLEEPS:
        wait_for(lambda: f"pod/{pod}" not in pods(lab))
    status = end_of(launcher, handle)
    assert (status.verdict, status.reason) == ("preempted", reason)


def test_a_node_whose_memory_ran_out_is_named(lab: Lab, tmp_path: Path) -> None:
    launcher, job = a_launcher(), python_job(tmp_path, SLEEPS, nodes=2)
    handle, hosts = running(launcher, job)
    lab.nodes.kill_for_memory(hosts[1])
    status = end_of(launcher, handle)
    assert (status.verdict, status.blamed_hosts) == ("out_of_memory", hosts[1:])


def test_a_failure_is_no_cancellation_after_the_cluster_has_removed_the_job(lab: Lab, tmp_path: Path) -> None:
    code = f"import os\nif os.environ['NODE_RANK'] == '1': raise SystemExit(17)\n{SLEEPS}"
    job = python_job(tmp_path, code, nodes=2)
    handle = submit(a_launcher(), job)
    hosts = end_of(a_launcher(), handle).blamed_hosts
    lab.clear()  # as a Job's time to live does
    status = a_launcher().status(handle)
    assert (status.state, status.exit_code, status.verdict, status.blamed_hosts) == ("failed", 17, "", hosts)


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({"image": "missing"}, {}, "ImagePullBackOff"),
        ({"claims": {"nowhere": "/runs"}}, {}, 'persistentvolumeclaim "nowhere" not found'),
        ({}, {"excluded_hosts": NODES[:3]}, "didn't match"),
        ({"resources": {"nvidia.com/gpu": "9"}}, {"processes_per_node": 1, "each_node": False}, "nvidia.com/gpu"),
    ],
)
def test_a_job_that_can_not_start_is_queued_with_the_reason(
    lab: Lab, tmp_path: Path, settings: dict[str, object], changes: dict[str, object], says: str
) -> None:
    job = dataclasses.replace(python_job(tmp_path, SLEEPS, nodes=2), **changes)  # type: ignore[arg-type]
    launcher = a_launcher(**settings)
    handle = submit(launcher, job)
    queued(launcher, handle, says)
    launcher.cancel(handle, grace_s=60)
    assert launcher.status(handle).ended
    assert not pods(lab)


def _as_kueue_says(second: int, message: str, workload: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{workload}.{second}", "namespace": "default"},
        "involvedObject": {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "name": workload},
        "type": "Warning",
        "reason": "Pending",
        "message": message,
        "lastTimestamp": f"2026-11-26T10:00:0{second}Z",
    }


def test_a_queue_that_takes_the_nodes_back_preempts_the_job(lab: Lab, tmp_path: Path) -> None:
    launcher, job = a_launcher(queue="team"), python_job(tmp_path, SLEEPS, nodes=2)
    handle = submit(launcher, job)
    queued(launcher, handle, "waits in Kueue's queue team")
    quota = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default"
    name = lab.kubectl("get", "jobs", "--output=jsonpath={.items[0].metadata.name}")
    for at, message, of in ((1, "an older reason", name), (2, quota, name), (3, "of another job", "other")):
        lab.kubectl("create", "--filename=-", text=json.dumps(_as_kueue_says(at, message, f"job-{of}-0a1b2")))
    queued(launcher, handle, f"waits in Kueue's queue team: {quota}")

    def suspend(value: str) -> None:
        name = lab.kubectl("get", "jobs", "--output=name")
        lab.kubectl("patch", name, "--type=merge", f'--patch={{"spec": {{"suspend": {value}}}}}')

    suspend("false")
    wait_for(lambda: launcher.status(handle).state == "running" and job.log.read_text().count("started") == 2)
    suspend("true")
    status = end_of(launcher, handle)
    assert (status.state, status.verdict) == ("failed", "preempted")
    wait_for(lambda: not lab.kubectl("get", "jobs,services", f"--selector={RUN_LABEL}", "--output=name"))


def test_nothing_is_concluded_while_the_server_is_away(lab: Lab, tmp_path: Path) -> None:
    launcher, job = a_launcher(), python_job(tmp_path, SLEEPS, nodes=2)
    handle, hosts = running(launcher, job)
    lab.server.stop_server()
    try:
        wait_for(lambda: launcher.status(handle).state != "running")
        status = launcher.status(handle)
        assert (status.state, "connection" in status.reason) == ("unknown", True)
    finally:
        lab.server.start_server()
    wait_for(lambda: launcher.status(handle).state != "unknown")
    assert launcher.status(handle) == Status(state="running", hosts=hosts)


def test_pods_that_take_long_to_list_are_listed_only_if_something_happens(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, job = a_launcher(), python_job(tmp_path, SLEEPS, nodes=2)
    handle, hosts = running(launcher, job)
    asked: list[str] = []
    ask = launcher._api.list

    def noted(kinds: str, **on: str) -> list[dict[str, Any]]:
        asked.append(kinds)
        return ask(kinds, **on)

    monkeypatch.setattr(launcher._api, "list", noted)
    monkeypatch.setattr("flows.launch.kubernetes.launcher._ASK_EVERY_S", 0.0)
    monkeypatch.setattr("flows.launch.kubernetes.launcher._listed_every_s", lambda _: float("inf"))

    def asks() -> list[str]:
        asked.clear()
        assert launcher.status(handle) == Status(state="running", hosts=hosts)
        return asked

    wait_for(lambda: asks() == ["jobs"])
    lab.kubectl("delete", pods(lab)[0], "--wait=false")
    assert end_of(launcher, handle).verdict == "preempted"
    assert "jobs,pods" in asked


def test_a_second_driver_gets_no_second_job(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen that there is no job; one comes later."""
    job = python_job(tmp_path, SLEEPS, nodes=2)
    running(a_launcher(), job)
    late = a_launcher()
    monkeypatch.setattr(late, "_remove", lambda _: None)
    with pytest.raises(RefusedError, match="already exists") as refused:
        submit(late, job)
    assert refused.value.reason == "AlreadyExists"
    assert len(pods(lab)) == 2


ROLE = """
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: driver}
rules:
- {apiGroups: [batch], resources: [jobs], verbs: [create, delete, get, list]}
- {apiGroups: [""], resources: [services], verbs: [create, delete, get, patch]}
- {apiGroups: [""], resources: [pods], verbs: [delete, get, list]}
- {apiGroups: [""], resources: [events], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: driver}
rules: [{apiGroups: [""], resources: [nodes], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: driver}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: driver}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: driver}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: driver}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: driver}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: driver}]
"""


def test_a_driver_without_rights_is_told_so_and_few_rights_are_enough_to_end_what_a_lost_node_leaves(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, lab.server.client(DRIVER))))
    launcher, job = a_launcher(), python_job(tmp_path, SLEEPS, nodes=2)
    with pytest.raises(RefusedError, match='User "driver" cannot create resource') as refused:
        submit(launcher, job)
    assert "kubectl auth can-i --list" in refused.value.hint

    lab.kubectl("create", "--filename=-", text=ROLE)
    job = python_job(tmp_path / "again", SLEEPS, nodes=2)
    wait_for(lambda: _may(launcher))
    handle, hosts = running(launcher, job)
    lab.nodes.cut(hosts[1])
    status = end_of(launcher, handle)
    assert (status.verdict, status.blamed_hosts, status.hosts) == ("node_failed", hosts[1:], hosts)
    assert not lab.nodes.is_busy(hosts[0]), "the others are ended"
    wait_for(lambda: hosts[1] not in a_launcher().hosts(2))
    launcher.cancel(handle, grace_s=0)
    assert not pods(lab), "the lost node's pod is removed"
    lab.nodes.boot(hosts[1])
    wait_for(lambda: lab.is_idle(hosts[1]))


def _may(launcher: KubernetesLauncher) -> bool:
    try:
        return len(launcher.hosts(2)) >= 0
    except RefusedError:
        return False


def test_a_patch_is_merged_by_the_names_of_parts(lab: Lab, tmp_path: Path) -> None:
    extra = {"name": "node", "env": [{"name": "EXTRA", "value": "1"}]}
    patch = {"spec": {"template": {"spec": {"hostNetwork": True, "containers": [extra]}}}}
    script = a_launcher(patch=patch).render(python_job(tmp_path, SLEEPS, nodes=2)).script
    assert "hostNetwork: true" in script
    assert "dnsPolicy: ClusterFirstWithHostNet" in script, "pods on the nodes' network find the first one by its name"
    assert "name: EXTRA" in script
    assert "name: NODE_RANK" in script, "lists are merged by name, not replaced"


@pytest.mark.parametrize(
    "patch",
    [
        {"spec": {"template": 1}},
        {"spec": {"template": {"spec": {"containers": 5}}}},
        {"spec": {"completions": 3}},
        {"metadata": {"name": "other"}},
        {"metadata": {"labels": None}},
    ],
)
def test_a_patch_that_takes_away_what_the_launcher_needs_is_refused(
    lab: Lab, tmp_path: Path, patch: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes\.patch="):
        a_launcher(patch=patch).render(python_job(tmp_path, SLEEPS, nodes=2))
