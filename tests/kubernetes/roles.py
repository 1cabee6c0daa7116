"""Who may do what on the stand-in: the roles that are bound to users, as Kubernetes' RBAC reads them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kubernetes.store import KINDS, ApiError, Object, Place, Store, named

ADMIN = "admin"


def allow(store: Store, user: str, verb: str, place: Place) -> None:
    """Return if a user may do this.

    Raises:
        ApiError: a 403 in the server's words.
    """
    resource, part, namespace = place.resource, place.part, place.namespace
    group = KINDS[resource].group.rpartition("/")[0]
    path = f"{resource}/{part}" if part else resource
    for rule in _rules(store, user, namespace):
        if verb in rule["verbs"] and path in rule["resources"] and group in rule["apiGroups"]:
            return
    if user == ADMIN:
        return
    where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
    what = f'User "{user}" cannot {verb} resource "{path}" in API group "{group}"{where}'
    which = f' "{place.name}"' if place.name else ""
    raise ApiError(403, "Forbidden", f"{named(resource)}{which} is forbidden: {what}")


def _rules(store: Store, user: str, namespace: str) -> Iterator[Object]:
    bindings = [*store.of("clusterrolebindings"), *(store.of("rolebindings", namespace) if namespace else ())]
    for binding in bindings:
        if {"User": user}.items() & {(one["kind"], one["name"]) for one in binding.get("subjects", [])}:
            ref = binding["roleRef"]
            cluster = ref["kind"] == "ClusterRole"
            role = store.find("clusterroles" if cluster else "roles", "" if cluster else namespace, ref["name"])
            yield from (role or {}).get("rules", [])
