"""What a cluster can't give is refused before a run is created, and what it may give later is a warning."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from conf.compose import compose
from conf.schema import Config
from flows.cluster_checks import _user, check_kubernetes
from flows.launch.base import AwayError
from flows.launch.kubernetes import api
from flows.launch.kubernetes.api import Api, RefusedError
from flows.launch.kubernetes.launcher import KubernetesLauncher
from flows.stages.validate import check_shape
from hlatctl.cli.main import main
from hlatctl.run.errors import ConfigError

TYPE = "node.kubernetes.io/instance-type"
IMAGE = "registry.example/hlatctl@sha256:ab"
BASE = (
    "experiment=hlat_7b",
    "cluster=eks_trn1",
    "cluster.nodes=2",
    f"cluster.kubernetes.image={IMAGE}",
    "runs_dir=/fsx/runs",
)


def configured(*overrides: str) -> Config:
    return compose([*BASE, *overrides])


def node(name: str, *, ready: bool = True, neuron: str = "16", kind: str = "trn1.32xlarge") -> dict[str, Any]:
    allocatable = {"vpc.amazonaws.com/efa": "8", "hugepages-2Mi": "5Gi", "memory": "520000000Ki", "cpu": "127900m"}
    return {
        "metadata": {"name": name, "labels": {TYPE: kind}},
        "status": {
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
            "allocatable": {**allocatable, **({"aws.amazon.com/neuron": neuron} if neuron else {})},
        },
    }


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The cluster's nodes, for a test to fill."""
    known: list[dict[str, Any]] = []
    monkeypatch.setattr(Api, "list", lambda self, kinds, **_: known)
    return known


def test_enough_nodes_of_the_right_size_pass_without_a_word(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("a"), node("b")]
    assert check_shape(configured()) == ""


@pytest.mark.parametrize(
    "second",
    [node("b", ready=False), node("b", kind="m5.large"), node("b", neuron="8")],
    ids=["not ready", "of another type", "too small"],
)
def test_too_few_nodes_are_a_warning_because_an_autoscaler_may_add_some(
    nodes: list[dict[str, Any]], second: dict[str, Any]
) -> None:
    nodes += [node("a"), second]
    assert check_shape(configured()).startswith("cluster.nodes=2: 1 of ")


def test_a_pod_that_no_node_of_its_instance_type_can_hold_is_refused(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("a"), node("b")]
    with pytest.raises(
        ConfigError, match=r"cluster\.kubernetes\.resources\.memory=900Gi: .* a has 520000000Ki"
    ) as seen:
        check_shape(configured("cluster.kubernetes.resources.memory=900Gi"))
    assert seen.value.hint.startswith("use at most 520000000Ki")
    nodes[:] = [node("a", neuron="")]
    with pytest.raises(ConfigError) as seen:
        check_shape(configured())
    assert seen.value.hint.startswith("install the device plug-in that offers aws.amazon.com/neuron")


def test_nodes_of_any_type_may_grow_so_a_pod_that_is_too_large_now_is_a_warning(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("a", neuron="")]
    cluster = configured().cluster
    anywhere = replace(cluster, kubernetes=replace(cluster.kubernetes, node_selector={}))
    assert api.check_limits(anywhere).startswith("cluster.nodes=2: 0 of 1 ")


@pytest.mark.parametrize(
    ("quantity", "number"), [("8", 8), ("127900m", 127.9), ("5Gi", 5 * 2**30), ("2M", 2_000_000), ("1.5k", 1500)]
)
def test_quantities_are_compared_as_numbers(quantity: str, number: float) -> None:
    assert float(api.amount(quantity)) == number


class Server:
    """Answers kubectl's questions; ``denied`` are verbs that the identity lacks."""

    def __init__(self) -> None:
        self.denied: tuple[str, ...] = ()
        self.away, self.phase = False, "Bound"
        self.versions = ("v1.32.4", "v1.36.0")

    def run(self, *words: str) -> str:
        """Do as ``Api.run``."""
        if self.away:
            raise AwayError("kubectl version: The connection to the server was refused")
        if words[:2] == ("auth", "can-i"):
            if words[2] in self.denied:
                raise RefusedError("kubectl auth: no", reason="")
            return "yes\n"
        if words[0] == "version":
            client, server = ({"gitVersion": version} for version in self.versions)
            return json.dumps({"clientVersion": client, "serverVersion": server})
        if words[1] == "persistentvolumeclaim":
            return json.dumps({"status": {"phase": self.phase}})
        raise RefusedError(f"kubectl get: Error from server (NotFound): {words[2]}", reason="NotFound")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]]) -> Server:
    answers = Server()
    nodes += [node("a"), node("b")]
    monkeypatch.setattr(Api, "run", lambda self, *words, text=None: answers.run(*words))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return answers


def shown(*overrides: str) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.shows) for check in check_kubernetes(configured(*overrides))}


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the user of the images."""
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    monkeypatch.setattr(os, "getgid", lambda: 10001)


def test_doctor_shows_one_line_for_each_thing_that_a_run_needs(server: Server, user: None) -> None:
    checks = shown()
    assert {status for status, _ in checks.values()} == {"pass"}
    assert checks["API server"][1] == "Kubernetes v1.36.0, kubectl v1.32.4"
    assert list(checks) == ["image", "kubectl", "API server", "rights", "nodes", "user of pods", "volume claim"]


@pytest.mark.parametrize(
    ("client", "cluster", "status", "says"),
    [
        ("v1.20.2", "v1.29.0", "pass", "kubectl v1.20.2"),
        ("v1.32.4-dispatcher", "v1.33.5-eks-3abbec1", "pass", "Kubernetes v1.33.5-eks-3abbec1"),
        ("v1.37.1", "v1.28.15", "fail", "Kubernetes must be 1.29 or newer"),
        ("v1.19.0", "v1.36.0", "skip", "kubectl older than 1.20 has not been tried"),
        ("?", "v2.0.0", "pass", "Kubernetes v2.0.0"),
    ],
)
def test_doctor_refuses_a_server_without_what_jobs_need(
    server: Server, client: str, cluster: str, status: str, says: str
) -> None:
    server.versions = (client, cluster)
    found = shown()["API server"]
    assert found[0] == status
    assert says in found[1]
    assert ("rights" in shown()) == (status != "fail")


@pytest.mark.parametrize(
    ("driver", "pods", "mode", "status", "says"),
    [
        ((10001, 10001), {"runAsUser": 10001}, "0700", "pass", "10001, as this driver"),
        ((0, 0), {"runAsUser": 0}, "0700", "skip", "a namespace with the profile `restricted` refuses them"),
        (
            (1234, 100),
            {"runAsUser": 10001},
            "0700",
            "fail",
            "10001, and this driver's is 1234: with runs_mode=0700 they",
        ),
        ((1234, 100), {"runAsUser": 10001, "fsGroup": 100}, "0770", "pass", "which runs_mode=0770 lets write"),
        ((1234, 100), {"runAsUser": 10001, "fsGroup": 100}, "0750", "fail", "with runs_mode=0750 they can't write"),
        ((1234, 100), {"fsGroup": 100}, "0700", "fail", "the one of the image, and this driver's is 1234"),
    ],
)
def test_doctor_compares_the_user_of_pods_with_its_own(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], pods: dict[str, int], mode: str, status: str, says: str
) -> None:
    work = {"spec": {"template": {"spec": {"securityContext": pods, "containers": [{}]}}}}
    plan = SimpleNamespace(script=yaml.safe_dump_all([{}, work]))
    monkeypatch.setattr(KubernetesLauncher, "render", lambda self, job: plan)
    monkeypatch.setattr(os, "getuid", lambda: driver[0])
    monkeypatch.setattr(os, "getgid", lambda: driver[1])
    check = _user(configured(f"runs_mode='{mode}'"))
    assert (check.status, says in check.shows) == (status, True), check


def test_doctor_names_what_is_missing(server: Server) -> None:
    server.denied, server.phase = ("delete",), "Pending"
    checks = shown("cluster.kubernetes.queue=night", "cluster.kubernetes.image=hlatctl:latest")
    assert checks["rights"][0] == "fail"
    assert "missing: delete jobs.batch, delete pods, delete services;" in checks["rights"][1]
    assert checks["volume claim"] == ("fail", "fsx is Pending, not Bound")
    assert checks["Kueue's queue"][0] == "fail"
    assert checks["image"][0] == "skip"


def test_doctor_asks_nothing_further_of_a_server_that_is_away(server: Server) -> None:
    server.away = True
    assert list(shown()) == ["image", "kubectl", "API server"]


@pytest.mark.processes
def test_plan_shows_the_manifest_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BASE]) == 0
    manifest = capsys.readouterr().out.partition("# manifest of the first training attempt\n")[2]
    assert manifest.startswith("apiVersion: v1\nkind: Service\n")


@pytest.mark.processes
def test_the_log_of_kubectl_is_no_part_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    program = tmp_path / "kubectl"
    log = 'E1122 21:19:22.357268   30678 memcache.go:265] "Unhandled Error" err="refused"'
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{log}\n{log}\n{refused}\nEND\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(AwayError) as away:
        Api(configured().cluster.kubernetes).run("get", "nodes")
    assert away.value.message == f"kubectl get: {refused}"
