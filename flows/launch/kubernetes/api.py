"""The Kubernetes cluster's API through kubectl, which handles the authentication of clouds.

``IN_NAMESPACE`` and ``IN_CLUSTER`` list what an identity must be allowed to do to drive runs;
deploy/kubernetes/rbac.yaml grants exactly this. ``check_limits`` checks before a run is created that the cluster has
nodes for it: Kubernetes accepts every job, and keeps pods that fit no node in the phase Pending forever.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.base import AwayError
from flows.launch.kubernetes.pods import is_usable
from hlatctl.run.errors import ConfigError, LaunchError

#: Longest wait for one answer.
_PATIENCE_S = 20
#: Beginnings of kubectl's output if the server, or something in front of it, does not answer now.
_AWAY = re.compile(
    r"The connection to the server|Unable to connect|dial tcp|i/o timeout|EOF|context deadline exceeded|"
    r"Error from server \((ServiceUnavailable|InternalError|Timeout|ServerTimeout|TooManyRequests|Unauthorized)\)|"
    r"RBAC: .*not found|"  # a server that has just started does not know its roles yet
    r"etcdserver|getting credentials|You must be logged in|the server is currently unable|http2:|TLS handshake"
)
#: Lines of kubectl's own log, which repeat the error below them (kubernetes/klog, header of a line).
_KLOG = re.compile(r"^[IWEF]\d{4} \d\d:.*$", re.MULTILINE)
_REASON = re.compile(r"Error from server \((\w+)\)")
_RIGHTS = "ask the cluster's administrator for this right; `kubectl auth can-i --list` shows those of your account"
#: A kind's objects, as kubectl prints them in JSON.
Object = dict[str, Any]


class RefusedError(LaunchError):
    """The API server refuses; ``reason`` is its term for the error, such as ``AlreadyExists``."""

    def __init__(self, message: str, *, reason: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class Api:
    """Queries the API server of a configuration.

    Args:
        settings: name the context and the namespace; without them kubectl's defaults apply.
    """

    def __init__(self, settings: KubernetesConfig) -> None:
        words = ["kubectl", f"--request-timeout={_PATIENCE_S}s"]
        words += [f"--context={settings.context}"] if settings.context else []
        words += [f"--namespace={settings.namespace}"] if settings.namespace else []
        self._words = tuple(words)

    def list(self, kinds: str, *, label: str = "", field: str = "") -> list[Object]:
        """Return the objects of some kinds, such as ``jobs,pods``, that have a label or a field.

        Raises:
            AwayError: the server does not answer.
            LaunchError: the server refuses.
        """
        words = [*([f"--selector={label}"] if label else []), *([f"--field-selector={field}"] if field else [])]
        return list(json.loads(self.run("get", kinds, *words, "--output=json"))["items"])

    def create(self, text: str) -> str:
        """Create the objects of a manifest; return the uid of the last one.

        Raises:
            RefusedError: an object exists already, or is refused.
        """
        uids = self.run("create", "--filename=-", "--output=jsonpath={.metadata.uid} ", text=text)
        return (uids.split() or [""])[-1]

    def own(self, kind: str, name: str, owner: Object) -> None:
        """Give an object an owner: the cluster deletes it once its owner is gone.

        Raises:
            LaunchError: the server refuses, or does not answer.
        """
        change = {"metadata": {"ownerReferences": [owner]}}
        self.run("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}")

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Request the deletion of an object and of everything that it owns; it may live on until these have ended."""
        force = () if grace_s is None else (f"--grace-period={grace_s}", *(("--force",) if grace_s == 0 else ()))
        cascade = () if kind == "pod" else ("--cascade=foreground",)
        self.run("delete", kind, name, "--ignore-not-found", "--wait=false", *cascade, *force)

    def run(self, *words: str, text: str | None = None) -> str:
        """Run kubectl with a text as its input, and return its output.

        Raises:
            AwayError: the server does not answer.
            RefusedError: the server refuses.
            LaunchError: kubectl is not installed.
        """
        try:
            done = subprocess.run(
                [*self._words, *words],
                input=text or "",
                capture_output=True,
                text=True,
                check=False,
                timeout=3 * _PATIENCE_S,
            )
        except FileNotFoundError:
            raise LaunchError(
                "kubectl: no such command on this machine",
                hint="install kubectl, and try `kubectl get nodes` (`hlatctl doctor` checks both)",
            ) from None
        except subprocess.TimeoutExpired:
            raise AwayError(f"kubectl {words[0]}: no answer in {3 * _PATIENCE_S} s") from None
        if done.returncode == 0:
            return done.stdout
        said = " ".join(_KLOG.sub("", done.stderr).split()) or f"exit code {done.returncode}"
        if _AWAY.search(said):
            raise AwayError(f"kubectl {words[0]}: {said}")
        reason = _REASON.search(said)
        raise RefusedError(
            f"kubectl {words[0]}: {said}",
            reason=reason[1] if reason else "",
            hint=_RIGHTS if reason and reason[1] == "Forbidden" else "`hlatctl doctor` checks the cluster",
        )


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one kind of object.

    Args:
        resource: the kind in the plural, with its group if it has one, such as ``jobs.batch``.
        verb: the verb as RBAC rules name it.
    """

    resource: str
    verb: str


#: Rights in the namespace of the jobs.
IN_NAMESPACE = (
    Right("events", "list"),
    Right("jobs.batch", "create"),
    Right("jobs.batch", "delete"),
    Right("jobs.batch", "list"),
    Right("pods", "delete"),
    Right("pods", "list"),
    Right("services", "create"),
    Right("services", "delete"),
    Right("services", "patch"),
)
#: Rights in the whole cluster: see whether a node answers, and which nodes jobs can use.
IN_CLUSTER = (Right("nodes", "list"),)
#: Read by ``hlatctl doctor --cluster`` only, which skips a check whose right is missing.
FOR_DOCTOR = (Right("localqueues.kueue.x-k8s.io", "get"), Right("persistentvolumeclaims", "get"))


Fields = Mapping[str, Any]
#: Nodes with the same value have the same size (Kubernetes, "Well-known labels").
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate(["n", "u", "m", "", *"kMGTPE"], start=-3)}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}


def check_limits(cluster: ClusterConfig) -> str:
    """Check that the cluster has nodes for a job of this shape, as ``Launcher.check_limits``.

    Too few fitting nodes are only a warning, because an autoscaler may add some. It is an error if all nodes have one
    instance type, which is too small.
    """
    settings, api = cluster.kubernetes, Api(cluster.kubernetes)
    try:
        matching = matching_nodes(settings, api.list("nodes"))
    except AwayError as error:
        raise AwayError(error.message, hint="try `kubectl get nodes`, and again when it answers") from None
    lacks = [lacking(settings, node) for node in matching]
    if _INSTANCE_TYPE in settings.node_selector and matching and all(lacks):
        name, has = lacks[0][0]
        raise ConfigError(
            f"cluster.kubernetes.resources.{name}={settings.resources[name]}: no {_selector(settings)} node gives so "
            f"much to a pod; {matching[0]['metadata']['name']} has {has}",
            hint=_hint(name, has),
        )
    fit = lacks.count([])
    if fit >= cluster.nodes:
        return ""
    return (
        f"cluster.nodes={cluster.nodes}: {fit} of {len(matching)} ready nodes with {_selector(settings)} have the "
        "resources that a pod asks for; the job waits until there are enough"
    )


def matching_nodes(settings: KubernetesConfig, nodes: Sequence[Fields]) -> list[Fields]:
    """Return the nodes on which new pods may be placed, whatever is running there now."""
    return [one for one in nodes if is_usable(one, settings)]


def lacking(settings: KubernetesConfig, node: Fields) -> list[tuple[str, str]]:
    """Return the resources of which a pod requests more than an empty node has, with the amount that the node has."""
    gives = node.get("status", {}).get("allocatable") or {}
    wanted = settings.resources.items()
    return [(name, gives.get(name, "0")) for name, much in wanted if amount(much) > amount(gives.get(name, "0"))]


def amount(quantity: str) -> Decimal:
    """Return a quantity, such as ``500m`` or ``64Gi``, as a number (Kubernetes, "Resource units")."""
    number = quantity.rstrip("numkKMGTPEi")
    return Decimal(number) * _UNITS[quantity[len(number) :]]


def _selector(settings: KubernetesConfig) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.node_selector.items()) or "any labels"


def _hint(name: str, has: str) -> str:
    if has == "0":
        return f"install the device plug-in that offers {name}, or use another cluster.kubernetes.node_selector"
    return f"use at most {has}, or another cluster.kubernetes.node_selector"
