"""What a cluster can give, asked before a run is created, so that no job waits forever.

Kubernetes accepts every job, and keeps pods that no node can take in the phase Pending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.kubernetes.api import Api, ApiAwayError
from flows.launch.kubernetes.pods import is_usable
from hlatctl.run.errors import ConfigError

Object = Mapping[str, Any]
#: Nodes with the same value are of the same size (Kubernetes, "Well-known labels").
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate(["n", "u", "m", "", *"kMGTPE"], start=-3)}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}


def check(cluster: ClusterConfig) -> str:
    """Check that the cluster has nodes for a job of this shape.

    Returns:
        A warning if too few fit now, because an autoscaler may add some; empty if there are enough.

    Raises:
        ConfigError: the nodes are of one instance type, which is too small.
        ApiAwayError: the server does not answer.
        LaunchError: it refuses, or there is no kubectl here.
    """
    settings, api = cluster.kubernetes, Api(cluster.kubernetes)
    try:
        matching = matching_nodes(settings, api.list("nodes"))
    except ApiAwayError as error:
        raise ApiAwayError(error.message, hint="try `kubectl get nodes`, and again when it answers") from None
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


def matching_nodes(settings: KubernetesConfig, nodes: Sequence[Object]) -> list[Object]:
    """Return the nodes on which new pods may be placed, whatever runs there now."""
    return [one for one in nodes if is_usable(one, settings.node_selector)]


def lacking(settings: KubernetesConfig, node: Object) -> list[tuple[str, str]]:
    """Return the resources of which a pod wants more than an empty node gives, with what the node gives."""
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
