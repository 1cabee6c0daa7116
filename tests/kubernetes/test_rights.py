"""deploy/kubernetes/rbac.yaml grants just what the launcher asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import flows
from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.kubernetes import api
from flows.launch.kubernetes import launcher as launching
from flows.launch.kubernetes.api import FOR_DOCTOR, IN_CLUSTER, IN_NAMESPACE, Right
from flows.launch.kubernetes.launcher import KubernetesLauncher
from tests.flows.launch.contract import python_job

DEPLOY = Path(flows.__file__).parents[1] / "deploy" / "kubernetes"
GROUPS = {"jobs": "jobs.batch", "job": "jobs.batch"}


def granted(kind: str) -> set[Right]:
    """What the roles of a kind in rbac.yaml allow."""
    objects = yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text(encoding="utf-8"))
    rules = [rule for one in objects if one["kind"] == kind for rule in one["rules"]]
    return {
        Right(".".join(filter(None, (resource, group))), verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_roles_grant_just_the_rights_that_the_launcher_and_doctor_name() -> None:
    assert granted("Role") == {*IN_NAMESPACE, *FOR_DOCTOR}
    assert granted("ClusterRole") == {*IN_CLUSTER}


def test_the_roles_are_bound_to_the_service_account_of_the_driver() -> None:
    objects = list(yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text(encoding="utf-8")))
    driver = yaml.safe_load((DEPLOY / "driver.yaml").read_text(encoding="utf-8"))
    account = next(one["metadata"] for one in objects if one["kind"] == "ServiceAccount")
    assert driver["metadata"]["namespace"] == account["namespace"]
    assert driver["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]
    for one in objects:
        if one["kind"].endswith("Binding"):
            assert one["subjects"] == [{"kind": "ServiceAccount", **account}]


class Recorder:
    """Stands in for kubectl: a job of two nodes, one of which is lost, until it is deleted; notes each request."""

    def __init__(self) -> None:
        self.used: set[Right] = set()
        self._pods: list[dict[str, Any]] = []

    def run(self, _: api.Api, *words: str, text: str | None = None) -> str:
        """Do as ``Api.run``."""
        verb, kinds = words[0], words[1].split(",")
        if verb == "create":
            objects = list(yaml.safe_load_all(text or ""))
            kinds = [f"{one['kind'].lower()}s" for one in objects]
            self._pods = [self._pod(0, "n1"), self._pod(1, "n2"), self._pod(2, "")]
        elif verb == "patch":
            kinds = [f"{words[1]}s"]
        elif verb == "delete":
            kinds = [f"{words[1]}s"]
            self._pods = [one for one in self._pods if words[1:3] != ("pod", one["metadata"]["name"])]
        else:
            verb = {"get": "list"}.get(verb, verb)
        self.used |= {Right(GROUPS.get(kind, kind), verb) for kind in kinds}
        return json.dumps({"items": self._pods if "pods" in kinds else []})

    def _pod(self, rank: int, host: str) -> dict[str, Any]:
        deleting = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if host else {}
        return {
            "kind": "Pod",
            "metadata": {"name": f"pod-{rank}", **deleting},
            "spec": {"nodeName": host},
            "status": {"phase": "Running" if host else "Pending"},
        }


def test_the_launcher_asks_for_each_of_these_rights_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is created, looked at while a pod waits and nodes are lost, deleted, and its lost pods with it."""
    recorder = Recorder()
    monkeypatch.setattr(api.Api, "run", lambda self, *words, text=None: recorder.run(self, *words, text=text))
    monkeypatch.setattr(launching, "_FENCED_AFTER_S", 0.0)
    launcher = KubernetesLauncher(
        ClusterConfig(launcher="kubernetes", nodes=2, kubernetes=KubernetesConfig(image="none"))
    )
    launcher.hosts(2)
    plan = launcher.render(python_job(tmp_path, "pass", nodes=2))
    handle = launcher.submit(plan)
    launcher.status(handle)
    launcher._why_it_starts_not(launcher._look("any").pods[-1])
    recorder._pods.pop()  # only the pods on lost nodes are left
    launcher.cancel(handle, grace_s=0)
    assert recorder.used == {*IN_NAMESPACE, *IN_CLUSTER}
