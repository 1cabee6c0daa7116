"""What an identity must be allowed to do to drive runs on a cluster. deploy/kubernetes/rbac.yaml grants just this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one kind of object.

    Args:
        resource: the kind in the plural, with its group if it has one, such as ``jobs.batch``.
        verb: as rules of roles name it.
    """

    resource: str
    verb: str


#: In the namespace of the jobs.
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
#: Of the whole cluster: whether a node answers, and which nodes jobs can use.
IN_CLUSTER = (Right("nodes", "list"),)
#: What only ``hlatctl doctor --cluster`` reads; a check that may not read it is skipped.
FOR_DOCTOR = (Right("localqueues.kueue.x-k8s.io", "get"), Right("persistentvolumeclaims", "get"))
