"""The manifests of Kubernetes jobs, as golden files. ``tests/kubernetes`` runs them."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.base import Job
from flows.launch.kubernetes.launcher import KubernetesLauncher
from flows.launch.kubernetes.manifest import label, manifest, object_name, submitted, text_of
from tests.flows.test_slurm_script import EVIL, ONE, TRAIN, UPDATE

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
PLAIN = ClusterConfig(launcher="kubernetes", worker_cache_dir="/cache", kubernetes=KubernetesConfig(image="hlatctl"))
EVERYTHING = ClusterConfig(
    launcher="kubernetes",
    nodes=2,
    processes_per_node=8,
    interface="eth0",
    worker_cache_dir="/cache",
    kubernetes=KubernetesConfig(
        image="registry.example/hlatctl@sha256:0",
        python="/opt/venv/bin/python",
        claims={"fsx": "/runs", "data": "/data"},
        cache_host_path="/mnt/nvme",
        resources={"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"},
        shared_memory="128Gi",
        node_selector={"node.kubernetes.io/instance-type": "p5.48xlarge"},
        tolerations=["nvidia.com/gpu"],
        queue="team",
        priority_class="training",
        service_account="worker",
        pull_secret="registry",
        grace_s=600,
        lost_after_s=120,
        keep_ended_s=3600,
    ),
)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the user of the images."""
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    monkeypatch.setattr(os, "getgid", lambda: 10001)


@pytest.mark.parametrize(
    ("name", "job", "cluster"),
    [("train", dataclasses.replace(TRAIN, avoided_hosts=("n9",)), EVERYTHING), ("one_process", ONE, PLAIN)],
)
def test_the_manifest_equals_the_golden_file(name: str, job: Job, cluster: ClusterConfig) -> None:
    text = text_of(manifest(job, cluster)).replace(sys.executable, "PYTHON")
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_manifest_without_a_patch_is_the_plan() -> None:
    plan = KubernetesLauncher(EVERYTHING).render(TRAIN)
    assert plan.script == text_of(manifest(TRAIN, EVERYTHING))
    assert plan.script_path == TRAIN.launch_dir / "train.yaml"


def test_what_is_submitted_differs_from_the_manifest_only_by_its_token() -> None:
    before = manifest(TRAIN, EVERYTHING)
    after = list(yaml.safe_load_all(submitted(text_of(before), "0123")))
    service, work = after
    for labels in (service["metadata"], work["metadata"], work["spec"]["template"]["metadata"]):
        assert labels["labels"].pop("hlatctl/token") == "0123"
    env = work["spec"]["template"]["spec"]["containers"][0]["env"]
    assert env.pop()["value"] == "0123"
    assert after == before


def test_the_service_and_the_rules_for_nodes_select_the_pods_of_this_job() -> None:
    service, work = manifest(TRAIN, EVERYTHING)
    name = work["metadata"]["name"]
    spec = work["spec"]["template"]["spec"]
    alone = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert service["spec"]["selector"] == alone["labelSelector"]["matchLabels"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"] == name
    env = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
    assert env["HLATCTL_MASTER_ADDR"] == f"{name}-0.{name}"


def test_pods_run_as_the_user_of_the_driver_also_if_it_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity() -> dict[str, object]:
        found: dict[str, object] = manifest(ONE, PLAIN)[1]["spec"]["template"]["spec"]["securityContext"]
        return found

    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    found = identity()
    assert (found["runAsUser"], found["runAsGroup"], found["fsGroup"], found["runAsNonRoot"]) == (1234, 100, 100, True)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert identity()["runAsUser"] == 0
    assert "runAsNonRoot" not in identity(), "the cluster would refuse its own user"


def test_an_evaluation_has_limits_and_nodes_of_its_own() -> None:
    own = dataclasses.replace(ONE, resources={"nvidia.com/gpu": "1"}, node_selector={"pool": "small"})
    pod = manifest(own, EVERYTHING)[1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert pod["nodeSelector"] == {"pool": "small"}
    assert (
        manifest(ONE, EVERYTHING)[1]["spec"]["template"]["spec"]["nodeSelector"] == EVERYTHING.kubernetes.node_selector
    )


@pytest.mark.parametrize(
    ("training", "devices", "own", "limits"),
    [
        ({"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "memory": "1Ti"}, 1, {}, {"nvidia.com/gpu": "1"}),
        ({"aws.amazon.com/neuron": "16"}, 1, {}, {"aws.amazon.com/neuron": "2"}),  # a chip is half a process of 8
        ({"nvidia.com/gpu": "8"}, 2, {"memory": "64Gi"}, {"nvidia.com/gpu": "2", "memory": "64Gi"}),
        ({"nvidia.com/gpu": "8"}, 1, {"nvidia.com/mig-1g.5gb": "1"}, {"nvidia.com/mig-1g.5gb": "1"}),
        ({"nvidia.com/gpu": "8"}, 0, {"memory": "64Gi"}, {"memory": "64Gi"}),  # on the CPU
    ],
)
def test_a_job_without_torchrun_asks_for_its_share_of_the_devices_of_training(
    training: dict[str, str], devices: int, own: dict[str, str], limits: dict[str, str]
) -> None:
    settings = dataclasses.replace(EVERYTHING.kubernetes, resources=training)
    job = dataclasses.replace(ONE, devices=devices, resources=own)
    pod = manifest(job, dataclasses.replace(EVERYTHING, kubernetes=settings))[1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": limits}


@pytest.mark.parametrize("run", ["plain", "A_Run.of-Mine", "ü" * 80, "-", "x" * 300])
def test_names_and_labels_are_those_that_a_cluster_takes(run: str) -> None:
    folder = f"/runs/{run}/launch/attempt-0002"
    names = [object_name(folder, "train"), object_name(folder, "eval-833333"), object_name(f"/other{folder}", "train")]
    assert len(set(names)) == len(names), "the place is part of the name"
    for name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(f"{name}-2047-abcde") <= 63
    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", label(run))


def test_values_never_become_syntax_of_kubernetes_or_of_a_shell() -> None:
    """A kubelet replaces ``$(NAME)``, so no dollar of ours stands alone."""
    (container,) = manifest(ONE, PLAIN)[1]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert not re.search(r"(?<!\$)\$(?!\$)", script.replace("$$", ""))
    assert EVIL.replace("'", "'\"'\"'").replace("$", "$$") in script
