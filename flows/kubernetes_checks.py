"""Checks of a Kubernetes cluster from this machine, for ``hlatctl doctor --cluster``. Creates nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from conf.schema import Config, KubernetesConfig
from flows.launch.base import Job
from flows.launch.kubernetes import limits
from flows.launch.kubernetes.api import Api, RefusedError
from flows.launch.kubernetes.launcher import KubernetesLauncher
from flows.launch.kubernetes.rights import IN_CLUSTER, IN_NAMESPACE, Right
from hlatctl.run.checks import Check
from hlatctl.run.errors import HlatctlError, LaunchError

#: The first minor version of 1.x whose servers have ``podReplacementPolicy`` by default (KEP 3939).
_OLDEST_SERVER = 29
#: All requests of the launcher were made with 1.20, 1.27 to 1.33 and 1.37, to a server of 1.36.
_OLDEST_KUBECTL = 20


def check_kubernetes(config: Config) -> Iterator[Check]:
    """Yield each check as it is done; without kubectl or an answer of the server, only those that need neither."""
    settings, api = config.cluster.kubernetes, Api(config.cluster.kubernetes)
    yield _image(settings)
    kubectl = shutil.which("kubectl")
    yield Check.of("kubectl", "" if kubectl else "not found; install it on the driver's machine", str(kubectl))
    if not kubectl:
        return
    server = _server(api)
    yield server
    if server.status == "fail":
        return
    yield _rights(api)
    yield _nodes(config)
    yield _user(config)
    for claim in settings.claims:
        yield _object(api, "volume claim", "persistentvolumeclaim", claim)
    if settings.queue:
        yield _object(api, "Kueue's queue", "localqueues.kueue.x-k8s.io", settings.queue)


def _image(settings: KubernetesConfig) -> Check:
    name, image = "image", settings.image
    if not image:
        shows = "cluster.kubernetes.image=null: build one with `make image`, and name it by digest"
        return Check(name=name, status="fail", shows=shows, command="make image IMAGE=cpu")
    if "@sha256:" not in image:
        shows = f"cluster.kubernetes.image={image}: a tag can change between attempts; better NAME@sha256:DIGEST"
        return Check(name=name, status="skip", shows=shows)
    return Check(name=name, status="pass", shows=image)


def _server(api: Api) -> Check:
    name, command = "API server", "kubectl version"
    try:
        versions = json.loads(api.run("version", "--output=json"))
    except LaunchError as error:
        return Check(name=name, status="fail", shows=error.message, command=command)
    client, server = (versions.get(f"{side}Version", {}).get("gitVersion", "?") for side in ("client", "server"))
    shows = f"Kubernetes {server}, kubectl {client}"
    if _minor(server) < _OLDEST_SERVER:
        shows += (
            f": Kubernetes must be 1.{_OLDEST_SERVER} or newer: older Jobs start a node's next pod before the last ends"
        )
        return Check(name=name, status="fail", shows=shows, command=command)
    if _minor(client) < _OLDEST_KUBECTL:
        shows += f": kubectl older than 1.{_OLDEST_KUBECTL} has not been tried; install a newer one"
        return Check(name=name, status="skip", shows=shows, command=command)
    return Check(name=name, status="pass", shows=shows, command=command)


def _minor(version: str) -> int:
    """Return N of ``v1.N.M``; of a version that is written otherwise, more than any."""
    found = re.match(r"v1\.(\d+)", version)
    return int(found[1]) if found else sys.maxsize


def _rights(api: Api) -> Check:
    """Check everything that the launcher asks for."""
    name, command = "rights", "kubectl auth can-i --list"
    try:
        denied = [f"{right.verb} {right.resource}" for right in (*IN_NAMESPACE, *IN_CLUSTER) if not _may(api, right)]
    except LaunchError as error:
        return Check(name=name, status="fail", shows=error.message, command=command)
    problem = f"missing: {', '.join(denied)}; see deploy/kubernetes/rbac.yaml" if denied else ""
    return Check.of(name, problem, f"{len(IN_NAMESPACE) + len(IN_CLUSTER)} of the launcher's verbs", command=command)


def _may(api: Api, right: Right) -> bool:
    """Return the server's answer, which is also kubectl's exit code."""
    try:
        return api.run("auth", "can-i", right.verb, right.resource).strip().startswith("yes")
    except RefusedError as error:
        if error.reason:
            raise
        return False


def _nodes(config: Config) -> Check:
    name, command, cluster = "nodes", "kubectl get nodes --show-labels", config.cluster
    try:
        warning = limits.check(cluster)
    except HlatctlError as error:
        return Check(name=name, status="fail", shows=str(error).replace("\nhint:", ";"), command=command)
    if warning:
        return Check(name=name, status="skip", shows=warning, command=command)
    shows = f"cluster.nodes={cluster.nodes}: at least so many ready nodes have the labels and resources asked for"
    return Check(name=name, status="pass", shows=shows, command=command)


def _user(config: Config) -> Check:
    """Check that pods can read and write run directories, which belong to the driver's user."""
    name, run = "user of pods", Path(config.runs_dir) / "doctor"
    job = Job(name="doctor", run_dir=run, argv=(), launch_dir=run / "launch" / "attempt-0000", log_dir=run / "logs")
    try:
        work = list(yaml.safe_load_all(KubernetesLauncher(config.cluster).render(job).script))[-1]
    except HlatctlError as error:
        return Check(name=name, status="fail", shows=str(error).replace("\nhint:", ";"), command="hlatctl plan")
    pod = work["spec"]["template"]["spec"]
    identity = {**(pod.get("securityContext") or {}), **(pod["containers"][0].get("securityContext") or {})}
    user, groups = identity.get("runAsUser"), {identity.get("runAsGroup"), identity.get("fsGroup")}
    own, mode = os.getuid(), config.runs_mode
    if user == own == 0:
        shows = "root, as this driver; a namespace with the profile `restricted` refuses them: use another user"
        return Check(name=name, status="skip", shows=shows, command="id -u")
    if user == own:
        return Check(name=name, status="pass", shows=f"{user}, as this driver")
    if int(mode, 8) & 0o070 == 0o070 and os.getgid() in groups:
        return Check(
            name=name, status="pass", shows=f"{user}, of this driver's group, which runs_mode={mode} lets write"
        )
    shows = (
        f"{'the one of the image' if user is None else user}, and this driver's is {own}: with runs_mode={mode} they "
    )
    shows += "can't write in its run directories; remove runAsUser from cluster.kubernetes.patch"
    return Check(name=name, status="fail", shows=shows, command="id -u")


def _object(api: Api, name: str, kind: str, wanted: str) -> Check:
    """Check that an object is there; of a volume claim, that it is bound."""
    command = f"kubectl describe {kind} {wanted}"
    try:
        found = json.loads(api.run("get", kind, wanted, "--output=json"))
    except RefusedError as error:
        may_not = error.reason == "Forbidden"
        return Check(name=name, status="skip" if may_not else "fail", shows=error.message, command=command)
    except LaunchError as error:
        return Check(name=name, status="fail", shows=error.message, command=command)
    phase = found.get("status", {}).get("phase", "")
    if kind == "persistentvolumeclaim" and phase != "Bound":
        return Check(name=name, status="fail", shows=f"{wanted} is {phase or '?'}, not Bound", command=command)
    return Check(name=name, status="pass", shows=f"{wanted} is {phase or 'there'}", command=command)
