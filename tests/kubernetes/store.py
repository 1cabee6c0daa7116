"""The objects of the stand-in's cluster: versions, selectors, merge patches and deletion as a server has them.

Rules are those of "Kubernetes API Concepts" and "Garbage Collection" in Kubernetes' documentation.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
FOREGROUND = "foregroundDeletion"
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Kind:
    """A kind of objects.

    Args:
        group: and version of its API, such as ``batch/v1``.
        resource: its name in paths.
        name: in objects.
        namespaced: its objects live in namespaces.
    """

    group: str
    resource: str
    name: str
    namespaced: bool = True


_RBAC = "rbac.authorization.k8s.io/v1"
KINDS = {
    kind.resource: kind
    for kind in (
        Kind("v1", "namespaces", "Namespace", False),
        Kind("v1", "nodes", "Node", False),
        Kind("v1", "persistentvolumes", "PersistentVolume", False),
        Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
        Kind("v1", "pods", "Pod"),
        Kind("v1", "services", "Service"),
        Kind("v1", "events", "Event"),
        Kind("batch/v1", "jobs", "Job"),
        Kind("coordination.k8s.io/v1", "leases", "Lease"),
        Kind(_RBAC, "roles", "Role"),
        Kind(_RBAC, "rolebindings", "RoleBinding"),
        Kind(_RBAC, "clusterroles", "ClusterRole", False),
        Kind(_RBAC, "clusterrolebindings", "ClusterRoleBinding", False),
    )
}


class ApiError(Exception):
    """A refusal, as the server's ``Status``."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class Place:
    """What a path names: ``/apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME/PART``."""

    def __init__(self, path: str) -> None:
        words = path.strip("/").split("/")
        size = 2 if words[0] == "api" else 3
        group, words = "/".join(words[1:size]), words[size:]
        self.namespace = ""
        if words[:1] == ["namespaces"] and len(words) > 2:
            self.namespace, words = words[1], words[2:]
        self.resource, self.name, self.part = (*words, "", "", "")[:3]
        if KINDS.get(self.resource, Kind("", "", "")).group != group:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")


class Store:
    """All objects. Whoever reads several of them, or changes one, holds ``lock``; ``put`` makes a change visible."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._version = 0

    def of(self, resource: str, namespace: str = "") -> Iterator[Object]:
        """The objects of a kind, of one namespace or of all, oldest first."""
        for (kind, place, _), one in list(self._objects.items()):
            if kind == resource and namespace in ("", place):
                yield one

    def find(self, resource: str, namespace: str, name: str) -> Object | None:
        return self._objects.get((resource, namespace, name))

    def get(self, resource: str, namespace: str, name: str) -> Object:
        one = self.find(resource, namespace, name)
        if one is None:
            raise ApiError(404, "NotFound", f'{named(resource)} "{name}" not found')
        return one

    @property
    def version(self) -> str:
        return str(self._version)

    def create(self, resource: str, namespace: str, value: Object) -> Object:
        """Add an object.

        Raises:
            ApiError: the name exists, or the namespace doesn't.
        """
        kind, one = KINDS[resource], copy.deepcopy(value)
        meta = one.setdefault("metadata", {})
        place = namespace if kind.namespaced else ""
        if not meta.get("name"):
            meta["name"] = f"{meta.get('generateName', '')}{uuid.uuid4().hex[:5]}"
        if place and self.find("namespaces", "", place) is None:
            raise ApiError(404, "NotFound", f'namespaces "{place}" not found')
        if self.find(resource, place, meta["name"]) is not None:
            raise ApiError(409, "AlreadyExists", f'{named(resource)} "{meta["name"]}" already exists')
        meta.update({"namespace": place} if place else {}, uid=str(uuid.uuid4()), creationTimestamp=now())
        one.update(apiVersion=kind.group, kind=kind.name)
        self._objects[resource, place, meta["name"]] = one
        return self.put(resource, one)

    def put(self, resource: str, one: Object) -> Object:
        """Give a changed object its new version. One that was asked to go goes, once nothing holds it."""
        meta = one["metadata"]
        self._version += 1
        meta["resourceVersion"] = self.version
        held = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" in meta and not held:
            self._remove(resource, one)
        return one

    def _remove(self, resource: str, one: Object) -> None:
        self._objects.pop((resource, one["metadata"].get("namespace", ""), one["metadata"]["name"]), None)

    def patch(self, resource: str, one: Object, change: Object, part: str = "") -> Object:
        """Merge a change into an object; ``part`` is ``status`` if only that may change.

        Raises:
            ApiError: the change is for another version.
        """
        version = change.get("metadata", {}).get("resourceVersion")
        if version not in (None, one["metadata"]["resourceVersion"]):
            message = "the object has been modified; please apply your changes to the latest version and try again"
            name = one["metadata"]["name"]
            raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on {named(resource)} "{name}": {message}')
        change = {part: change.get(part, {})} if part else {key: change[key] for key in change if key != "status"}
        merged = merge(one, change)
        if merged != one:
            one.clear()
            one.update(merged)
            self.put(resource, one)
        return one

    def delete(self, resource: str, one: Object, *, policy: str = "Background", grace_s: int | None = None) -> None:
        """Delete an object: a running pod after its grace period, others when no finalizer holds them."""
        meta = one["metadata"]
        if policy == "Foreground" and FOREGROUND not in meta.get("finalizers", []):
            meta.setdefault("finalizers", []).append(FOREGROUND)
        if resource == "pods":
            grace_s = _grace_s(one, grace_s)
            grace_s = min(grace_s, meta.get("deletionGracePeriodSeconds", grace_s))
            meta["deletionGracePeriodSeconds"] = grace_s
        elif meta.get("finalizers"):
            meta["deletionGracePeriodSeconds"] = 0
        else:
            self._remove(resource, one)
            return
        meta.setdefault("deletionTimestamp", now((grace_s or 0) if resource == "pods" else 0))
        self.put(resource, one)


def _grace_s(pod: Object, asked_s: int | None) -> int:
    """A pod without a node, or one that has ended, has nothing to stop."""
    if not pod["spec"].get("nodeName") or pod["status"].get("phase") in _ENDED:
        return 0
    return int(pod["spec"].get("terminationGracePeriodSeconds", 30)) if asked_s is None else asked_s


def named(resource: str) -> str:
    group = KINDS[resource].group.rpartition("/")[0]
    return f"{resource}.{group}" if group else resource


def now(later_s: float = 0) -> str:
    """Return the time as objects hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + later_s))


def merge(target: Any, change: Any) -> Any:
    """Return a value after a JSON merge patch (RFC 7386)."""
    if not isinstance(change, dict):
        return change
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def selected(one: Object, labels: str, fields: str) -> bool:
    own = one["metadata"].get("labels") or {}
    return all(_is(own.get(key), sign, value) for key, sign, value in _terms(labels)) and all(
        _is(_field(one, key), sign, value) for key, sign, value in _terms(fields)
    )


def _terms(selector: str) -> Iterator[tuple[str, str, str]]:
    for term in filter(None, selector.split(",")):
        sign = "!=" if "!=" in term else "="
        key, found, value = term.replace("==", "=").partition(sign)
        yield key, sign if found else "", value


def _is(found: Any, sign: str, value: str) -> bool:
    if not sign:
        return found is not None
    return bool(found == value) == (sign == "=")


def _field(one: Object, path: str) -> Any:
    found: Any = one
    for step in path.split("."):
        found = found.get(step, "") if isinstance(found, dict) else ""
    return found


def condition(one: Object, kind: str, status: str, reason: str, message: str) -> bool:
    conditions = one.setdefault("status", {}).setdefault("conditions", [])
    old: Object = next((each for each in conditions if each["type"] == kind), {})
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    if all(old.get(key) == value for key, value in new.items()):
        return False
    since = old.get("lastTransitionTime") if old.get("status") == status else now()
    one["status"]["conditions"] = [each for each in conditions if each is not old] + [
        {**new, "lastTransitionTime": since}
    ]
    return True


def has(one: Object, kind: str, status: str = "True") -> bool:
    conditions = one.get("status", {}).get("conditions") or []
    return any(each["type"] == kind and each["status"] == status for each in conditions)


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
