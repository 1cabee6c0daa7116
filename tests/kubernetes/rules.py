"""What a cluster checks in manifests beyond their schemas, and what hlatctl's own pods rely on.

Each rule yields what is wrong, with its place. Sources: Kubernetes' validation of Jobs and pods ("Jobs", "Pod failure
policy", "Manage HugePages", "Extended resources", "DNS for Services and Pods" in its documentation).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Object = dict[str, Any]
Problems = Iterator[str]
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: A container's argument: the kubelet replaces $(NAME) and reads $$ as $.
_REFERENCE = re.compile(r"(?<!\$)(?:\$\$)*\$\(([^)]*)\)")
_HUGE = "hugepages-"


def problems(objects: list[Object]) -> list[str]:
    """Return all that is wrong with the objects of one manifest."""
    jobs = [one for one in objects if one["kind"] == "Job"]
    found = [problem for job in jobs for rule in _OF_JOBS for problem in rule(job)]
    services = [one for one in objects if one["kind"] == "Service"]
    found += [problem for service in services for problem in _service(service, jobs)]
    found += [problem for job in jobs for problem in _subdomain(job, services)]
    return found + list(_bindings(objects)) + list(_labels(objects))


def _pod(job: Object) -> Object:
    return dict(job["spec"]["template"]["spec"])


def _pod_labels(job: Object) -> dict[str, str]:
    """The labels of a Job's pods: the template's, and those that the Job controller adds."""
    name = job["metadata"]["name"]
    own = job["spec"]["template"].get("metadata", {}).get("labels", {})
    return {**own, "job-name": name, "batch.kubernetes.io/job-name": name}


def _containers(job: Object) -> list[Object]:
    return [*_pod(job).get("initContainers", []), *_pod(job)["containers"]]


def _selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _service(service: Object, jobs: list[Object]) -> Problems:
    spec, name = service["spec"], service["metadata"]["name"]
    if not any(_selects(spec.get("selector", {}), _pod_labels(job)) for job in jobs):
        yield f"Service {name}: its selector matches no pod of the manifest"
    if spec.get("clusterIP") != "None":
        yield f"Service {name}: clusterIP must be None, so that each pod has a name of its own"
    if not spec.get("publishNotReadyAddresses"):
        yield f"Service {name}: publishNotReadyAddresses must be true: pods find each other before they are ready"


def _subdomain(job: Object, services: list[Object]) -> Problems:
    wanted, names = _pod(job).get("subdomain"), [one["metadata"]["name"] for one in services]
    if wanted is not None and wanted not in names:
        yield f"subdomain {wanted}: there is no Service of this name"
    own = job["metadata"]["name"]
    for one in _containers(job)[0].get("env", []):
        if one["name"] == "HLATCTL_MASTER_ADDR" and one["value"] != f"{own}-0.{wanted}":
            yield f"HLATCTL_MASTER_ADDR={one['value']}: the first pod is {own}-0.{wanted}"


def _job(job: Object) -> Problems:
    spec, name = job["spec"], job["metadata"]["name"]
    if spec.get("completionMode") == "Indexed":
        if spec.get("completions") != spec.get("parallelism"):
            yield f"Job {name}: completions and parallelism must be equal: all nodes run at once"
        if not _DNS_LABEL.fullmatch(f"{name}-{spec.get('completions', 1) - 1}"):
            yield f"Job {name}: its pods' host names are no DNS labels of at most 63 characters"
    if _pod(job).get("restartPolicy") != "Never":
        yield f"Job {name}: restartPolicy must be Never"
    if spec.get("podReplacementPolicy") != "Failed":
        yield f"Job {name}: podReplacementPolicy must be Failed, or two pods of one index run at once"


def _ends_at_first_failure(job: Object) -> Problems:
    """A policy that ignores some failures goes with restarts; without one, the first failure ends the job."""
    spec = job["spec"]
    if "podFailurePolicy" not in spec and spec.get("backoffLimit") != 0:
        yield f"Job {job['metadata']['name']}: backoffLimit must be 0: the driver restarts, not the cluster"
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        wanted = rule.get("onExitCodes", {}).get("containerName")
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "podFailurePolicy: a rule has either onExitCodes or onPodConditions"
        if wanted and wanted not in [one["name"] for one in _containers(job)]:
            yield f"podFailurePolicy: there is no container {wanted}"
        values = rule.get("onExitCodes", {}).get("values", [1])
        if values != sorted(set(values)) or 0 in values:
            yield f"podFailurePolicy: values {values} must be ordered, different, and without 0"


def _volumes(job: Object) -> Problems:
    names = [one["name"] for one in _pod(job).get("volumes", [])]
    mounted = [mount for one in _containers(job) for mount in one.get("volumeMounts", [])]
    for name in sorted({one for one in names if names.count(one) > 1}):
        yield f"volume {name}: there are several of this name"
    for mount in mounted:
        if mount["name"] not in names:
            yield f"volumeMount {mount['name']}: there is no such volume"
    for name in sorted({*names} - {mount["name"] for mount in mounted}):
        yield f"volume {name}: nothing mounts it"
    for one in _containers(job):
        paths = [mount["mountPath"] for mount in one.get("volumeMounts", [])]
        for path in sorted({path for path in paths if paths.count(path) > 1 or not path.startswith("/")}):
            yield f"mountPath {path}: must be absolute, and mounted once"


def _resources(job: Object) -> Problems:
    """Devices and huge pages can't be overcommitted; huge pages come with cpu or memory."""
    for one in _containers(job):
        limits, requests = (one.get("resources", {}).get(key, {}) for key in ("limits", "requests"))
        whole = sorted(name for name in {*limits, *requests} if "/" in name or name.startswith(_HUGE))
        for name in whole:
            if name not in limits or requests.get(name, limits[name]) != limits[name]:
                yield f"resource {name}: the request must equal the limit"
        if any(name.startswith(_HUGE) for name in whole) and not {"cpu", "memory"} & {*limits, *requests}:
            yield "resource hugepages: needs cpu or memory too"


def _is_restricted(job: Object) -> Problems:
    """The profile "restricted" of the Pod Security Standards, but for a driver that is root."""
    whole = _pod(job).get("securityContext", {})
    if whole.get("runAsNonRoot") is not True and whole.get("runAsUser") != 0:
        yield "securityContext: runAsNonRoot must be true"
    if whole.get("runAsNonRoot") is True and not whole.get("runAsUser"):
        yield "securityContext: runAsUser must be a number other than 0"
    if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext: seccompProfile.type must be RuntimeDefault"
    for one in _containers(job):
        own = one.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"container {one['name']}: allowPrivilegeEscalation must be false"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"container {one['name']}: must drop all capabilities"


def _host_network(job: Object) -> Problems:
    if _pod(job).get("hostNetwork") and _pod(job).get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "hostNetwork: dnsPolicy must be ClusterFirstWithHostNet, or no pod finds the first one by its name"


def _variables(job: Object) -> Problems:
    for one in _containers(job):
        env = one.get("env", [])
        names = [each["name"] for each in env]
        for each in env:
            if ("value" in each) == ("valueFrom" in each):
                yield f"env {each['name']}: has either value or valueFrom"
            if not isinstance(each.get("value", ""), str):
                yield f"env {each['name']}: {each['value']!r} is no string"
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"env {name}: there are several of this name"
        for text in (*one.get("command", []), *one.get("args", [])):
            for name in _REFERENCE.findall(text):
                yield f"$({name}): the kubelet would replace this; write $$"


def _affinity(job: Object) -> Problems:
    pods = _pod(job).get("affinity", {}).get("podAntiAffinity", {})
    for term in pods.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        if not _selects(term["labelSelector"]["matchLabels"], _pod_labels(job)):
            yield "podAntiAffinity: its selector does not match the Job's own pods"
    nodes = _pod(job).get("affinity", {}).get("nodeAffinity", {})
    required = nodes.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    preferred = nodes.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    for term in (*required, *(one["preference"] for one in preferred)):
        for field in term.get("matchFields", []):
            if field["key"] != "metadata.name" or len(field["values"]) != 1:
                yield f"matchFields {field}: a cluster takes only metadata.name, with one value"


def _labels(objects: list[Object]) -> Problems:
    for one in objects:
        places = [one, *([one["spec"]["template"]] if one["kind"] == "Job" else [])]
        for place in places:
            for key, value in place.get("metadata", {}).get("labels", {}).items():
                if not isinstance(value, str) or not _LABEL.fullmatch(value):
                    yield f"label {key}={value}: must be 63 characters of A-Z a-z 0-9 . _ -"


def _bindings(objects: list[Object]) -> Problems:
    known = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for one in objects:
        if one["kind"].endswith("Binding"):
            wanted = [one["roleRef"], *one.get("subjects", [])]
            for each in wanted:
                if (each["kind"], each["name"]) not in known:
                    yield f"{one['kind']} {one['metadata']['name']}: there is no {each['kind']} {each['name']}"


_OF_JOBS: tuple[Callable[[Object], Problems], ...] = (
    _job,
    _ends_at_first_failure,
    _volumes,
    _resources,
    _variables,
    _affinity,
    _is_restricted,
    _host_network,
)
