"""Where the stand-in's cluster places a pod: the filters of Kubernetes' scheduler that the launcher's pods can meet."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

from tests.kubernetes.store import Object, Store, condition, has, now

_ENDED = ("Succeeded", "Failed")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def place(store: Store, pod: Object) -> None:
    """Give a pod its node, or say why there is none."""
    nodes, why = list(store.of("nodes")), Counter[str]()
    claims = _claims(store, pod)
    for node in nodes if not claims else []:
        refusals = _refusals(store, pod, node)
        if not refusals:
            pod["spec"]["nodeName"] = node["metadata"]["name"]
            condition(pod, "PodScheduled", "True", "", "")
            store.put("pods", pod)
            return
        why[refusals[0]] += 1
    reasons = [claims] if claims else [f"{count} {reason}" for reason, count in sorted(why.items())]
    message = f"0/{len(nodes)} nodes are available: {', '.join(reasons)}."
    if condition(pod, "PodScheduled", "False", "Unschedulable", message):
        store.put("pods", pod)
        _tell(store, pod, message)


def _tell(store: Store, pod: Object, message: str) -> None:
    meta = pod["metadata"]
    about = {"kind": "Pod", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
    event = {
        "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:12]}"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": message,
        "eventTime": now(),
    }
    store.create("events", meta["namespace"], event)


def _claims(store: Store, pod: Object) -> str:
    """Return what is wrong with the claims of a pod."""
    for volume in pod["spec"].get("volumes", []):
        name = volume.get("persistentVolumeClaim", {}).get("claimName")
        claim = store.find("persistentvolumeclaims", pod["metadata"]["namespace"], name) if name else {}
        if claim is None:
            return f'persistentvolumeclaim "{name}" not found'
        if name and claim.get("status", {}).get("phase") != "Bound":
            return "pod has unbound immediate PersistentVolumeClaims"
    return ""


def _refusals(store: Store, pod: Object, node: Object) -> list[str]:
    """Return why a node is not for a pod, in the words of the scheduler."""
    spec = pod["spec"]
    here = [
        one
        for one in store.of("pods")
        if one["spec"].get("nodeName") == node["metadata"]["name"] and one["status"].get("phase") not in _ENDED
    ]
    refusals = ["node(s) were unschedulable"] if node["spec"].get("unschedulable") else []
    untolerated = (
        taint
        for taint in node["spec"].get("taints", [])
        if not any(tolerates(one, taint) and "tolerationSeconds" not in one for one in spec.get("tolerations", []))
    )
    refusals += [f"node(s) had untolerated taint(s) {taint['key']}" for taint in untolerated]
    if not has(node, "Ready") and not refusals:
        refusals.append("node(s) were not ready")
    if not _matches(spec, node):
        refusals.append("node(s) didn't match Pod's node affinity/selector")
    affinity = spec.get("affinity", {}).get("podAntiAffinity", {})
    for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        labels = term["labelSelector"]["matchLabels"].items()
        if any(labels <= (one["metadata"].get("labels") or {}).items() for one in here):
            refusals.append("node(s) didn't match pod anti-affinity rules")
    room = node.get("status", {}).get("allocatable", {})
    wanted = _wanted(pod)
    used = sum((_wanted(one) for one in here), Counter[str]())
    refusals += [f"Insufficient {key}" for key in wanted if used[key] + wanted[key] > amount(room.get(key, "0"))]
    return refusals


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether a toleration is one of this taint."""
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    same_key = toleration.get("key") in (None, taint["key"])
    return same_key and same_value and toleration.get("effect") in (None, taint["effect"])


def _matches(spec: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    if not spec.get("nodeSelector", {}).items() <= labels.items():
        return False
    affinity: Object = spec.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return terms is None or any(all(_fulfils(one, node) for one in term["matchFields"]) for term in terms)


def _fulfils(requirement: Object, node: Object) -> bool:
    """A field takes one value, and only the name is one (Kubernetes' validation of ``matchFields``)."""
    (value,) = requirement["values"]
    same: bool = node["metadata"]["name"] == value
    wanted: bool = requirement["operator"] == "In"
    return same == wanted


def _wanted(pod: Object) -> Counter[str]:
    """Return what a pod asks for; limits count where nothing else is said."""
    total = Counter[str](pods=1)
    for container in pod["spec"]["containers"]:
        given: dict[str, Any] = container.get("resources", {})
        for key, value in {**given.get("limits", {}), **given.get("requests", {})}.items():
            total[key] += amount(str(value))
    return total


def amount(text: str) -> int:
    """Return a quantity in thousandths."""
    digits = text.rstrip("kMGTim")
    unit = text[len(digits) :]
    return int(float(digits)) if unit == "m" else int(float(digits) * _UNITS[unit] * 1000)
