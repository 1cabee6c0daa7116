"""Every manifest of this project fits the schemas of three versions of Kubernetes, and rules that no schema holds.

``schemas/README.md`` says where the schemas are from.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import flows
from conf.compose import compose
from flows.launch.kubernetes.manifest import manifest, submitted, text_of
from tests.flows.test_slurm_script import TRAIN
from tests.kubernetes.rules import problems
from tests.kubernetes.schemas.collect import FOLDER, KIND, KINDS, VERSIONS

Object = dict[str, Any]
TOP = Path(flows.__file__).parents[1]
GOLDEN = TOP / "tests" / "golden" / "kubernetes"


def read(*paths: Path) -> list[Object]:
    return [one for path in paths for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def example(*overrides: str) -> list[Object]:
    """What is submitted for an attempt on a cluster of the examples."""
    settings = compose([*overrides, "cluster.kubernetes.image=image", "runs_dir=/fsx/runs"]).cluster
    return list(yaml.safe_load_all(submitted(text_of(manifest(TRAIN, settings)), "0123")))


MANIFESTS: dict[str, Callable[[], list[Object]]] = {
    "train": lambda: read(GOLDEN / "train.yaml"),
    "one_process": lambda: read(GOLDEN / "one_process.yaml"),
    "eks_trn1": lambda: example("experiment=hlat_7b", "cluster=eks_trn1"),
    "eks_trn2": lambda: example("experiment=hlat_7b_trn2", "cluster=eks_trn2"),
    "eks_p5": lambda: example("cluster=eks_p5"),
    "deploy": lambda: read(*sorted((TOP / "deploy" / "kubernetes").glob("*.yaml"))),
}


@cache
def validators(version: str) -> dict[tuple[str, str], Draft202012Validator]:
    """A version's validators, by version of the API and kind."""
    definitions = json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8"))["$defs"]
    return {
        ("/".join(filter(None, (one["group"], one["version"]))), one["kind"]): Draft202012Validator(
            {"$ref": f"#/$defs/{name}", "$defs": definitions}
        )
        for name, definition in definitions.items()
        for one in definition.get(KIND, ())
    }


def misfits(version: str, objects: list[Object]) -> list[str]:
    """What a version's schemas refuse, each with its place."""
    found = []
    for one in objects:
        errors = validators(version)[one["apiVersion"], one["kind"]].iter_errors(one)
        found += [f"{one['kind']}{error.json_path.removeprefix('$')}: {error.message}" for error in errors]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_the_schemas_of_three_versions(name: str, version: str) -> None:
    assert misfits(version, MANIFESTS[name]()) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_have_each_kind_of_ours(version: str) -> None:
    assert {name for _, name in validators(version)} == {name for _, name in KINDS}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_keep_the_rules_that_schemas_do_not_know(name: str) -> None:
    assert problems(MANIFESTS[name]()) == []


def broken(name: str, path: str, value: object) -> list[Object]:
    """A manifest with one value changed; None removes it. ``path`` begins with the object's kind."""
    objects = copy.deepcopy(MANIFESTS[name]())
    kind, *keys = path.split(".")
    place: Any = next(one for one in objects if one["kind"] == kind)
    steps: list[Any] = [int(key) if key.isdigit() else key.replace("|", ".") for key in keys]
    for step in steps[:-1]:
        place = place[step]
    if value is None:
        del place[steps[-1]]
    elif isinstance(place, list) and steps[-1] == len(place):
        place.append(value)
    else:
        place[steps[-1]] = value
    return objects


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("Job.spec.parallelisms", 2),
        ("Job.spec.backoffLimit", "0"),
        ("Job.spec.template.spec.containers.0.env.2.value", 2),
        ("Job.spec.template.spec.containers.0.volumeMounts.0.path", "/x"),
        ("Job.spec.template.spec.containers", None),
        ("Service.spec.selector", ["a"]),
    ],
)
def test_a_schema_refuses_an_unknown_field_a_wrong_type_and_a_missing_part(
    path: str, value: object, version: str
) -> None:
    assert misfits(version, broken("train", path, value))


POD = "Job.spec.template.spec"
NODE = f"{POD}.containers.0"
LONG = "a" * 62


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("train", "Service.spec.selector.batch|kubernetes|io/job-name", "other", "selector matches no pod"),
        ("train", "Service.spec.selector", {}, "selector matches no pod"),
        ("train", "Service.spec.clusterIP", None, "clusterIP must be None"),
        ("train", "Service.spec.publishNotReadyAddresses", False, "publishNotReadyAddresses must be true"),
        ("train", f"{POD}.subdomain", "other", "subdomain other: there is no Service"),
        ("train", f"{NODE}.env.3.value", "other-0.other", "HLATCTL_MASTER_ADDR=other-0.other"),
        ("train", "Job.spec.parallelism", 1, "completions and parallelism must be equal"),
        ("train", "Job.metadata.name", LONG, "no DNS labels of at most 63"),
        ("train", f"{POD}.restartPolicy", "OnFailure", "restartPolicy must be Never"),
        ("train", "Job.spec.podReplacementPolicy", "TerminatingOrFailed", "podReplacementPolicy must be Failed"),
        ("deploy", "Job.spec.podReplacementPolicy", None, "podReplacementPolicy must be Failed"),
        ("train", "Job.spec.backoffLimit", 1, "backoffLimit must be 0"),
        ("deploy", "Job.spec.podFailurePolicy.rules.0.onExitCodes.containerName", "x", "no container x"),
        ("deploy", "Job.spec.podFailurePolicy.rules.0.onExitCodes.values", [0, 2], "without 0"),
        ("deploy", "Job.spec.podFailurePolicy.rules.0.onExitCodes.values", [3, 2], "ordered"),
        ("deploy", "Job.spec.podFailurePolicy.rules.0.onPodConditions", [], "either onExitCodes or onPodConditions"),
        ("train", f"{NODE}.volumeMounts.0.name", "nowhere", "volumeMount nowhere: there is no such volume"),
        ("train", f"{POD}.volumes.4", {"name": "idle", "emptyDir": {}}, "volume idle: nothing mounts it"),
        ("train", f"{POD}.volumes.1.name", "shm", "volume shm: there are several"),
        ("train", f"{NODE}.volumeMounts.1.mountPath", "/dev/shm", "mountPath /dev/shm: must be"),
        ("train", f"{NODE}.volumeMounts.1.mountPath", "cache", "mountPath cache: must be absolute"),
        ("train", f"{NODE}.resources.requests", {"nvidia.com/gpu": "4"}, "nvidia.com/gpu: the request must equal"),
        ("train", f"{NODE}.resources", {"requests": {"vpc.amazonaws.com/efa": "1"}}, "the request must equal"),
        ("eks_trn1", f"{NODE}.resources.requests", {"hugepages-2Mi": "2Mi"}, "hugepages-2Mi: the request must equal"),
        ("train", f"{NODE}.resources.limits", {"hugepages-2Mi": "2Mi"}, "needs cpu or memory"),
        ("train", f"{NODE}.env.2.value", 2, "env HLATCTL_NODES: 2 is no string"),
        ("train", f"{NODE}.env.0.value", "0", "env NODE_RANK: has either value or valueFrom"),
        ("train", f"{NODE}.env.2.name", "NODE_RANK", "env NODE_RANK: there are several"),
        ("train", f"{NODE}.args.0", "echo $$$(HOME)", "the kubelet would replace this"),
        ("train", f"{POD}.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution.0.labelSelector"
         ".matchLabels", {"a": "b"}, "podAntiAffinity: its selector does not match"),
        ("train", f"{POD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0"
         ".matchFields.0.values", ["n3", "n7"], "with one value"),
        ("train", "Job.metadata.labels.hlatctl/run", "a b", "label hlatctl/run=a b"),
        ("train", f"{POD}.hostNetwork", True, "dnsPolicy must be ClusterFirstWithHostNet"),
        ("train", f"{POD}.securityContext.runAsNonRoot", None, "runAsNonRoot must be true"),
        ("deploy", f"{POD}.securityContext.runAsUser", None, "runAsUser must be a number"),
        ("deploy", f"{POD}.securityContext.seccompProfile", None, "must be RuntimeDefault"),
        ("train", f"{NODE}.securityContext.capabilities", None, "must drop all capabilities"),
        ("train", f"{NODE}.securityContext.allowPrivilegeEscalation", None, "allowPrivilegeEscalation must be false"),
        ("deploy", "RoleBinding.roleRef.name", "other", "RoleBinding hlatctl-driver: there is no Role other"),
        ("deploy", "ClusterRoleBinding.subjects.0.name", "other", "there is no ServiceAccount other"),
    ],
)  # fmt: skip
def test_a_rule_refuses_a_manifest_that_breaks_it(name: str, path: str, value: object, says: str) -> None:
    found = problems(broken(name, path, value))
    assert any(says in problem for problem in found), found
