"""What the stand-in's cluster does by itself: jobs, placement, lost nodes and garbage, as Kubernetes' own controllers.

They know what the launcher's objects ask for, and no more. Messages and reasons are those of Kubernetes 1.36.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from datetime import datetime

from tests.kubernetes import placement
from tests.kubernetes.jobs import TRACKING, Jobs, owners, release
from tests.kubernetes.store import FOREGROUND, Object, Store, condition, has, now

_TICK_S = 0.05
_UNREACHABLE = "node.kubernetes.io/unreachable"


class Controllers:
    """All controllers, in one thread.

    Args:
        store: holds the objects.
        silence: a node is unreachable if another one has renewed its lease so often since it has. A clock would count
            the pauses of a loaded machine too, in which no node can renew its lease.
    """

    def __init__(self, store: Store, silence: int) -> None:
        self._store, self._silence, self._jobs = store, silence, Jobs(store)
        self._renewed: dict[str, str] = {}
        self._others: dict[str, Counter[str]] = defaultdict(Counter)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def forgive(self) -> None:
        """Count every node's silence anew: nobody could renew a lease while the server was away."""
        with self._store.lock:
            self._others.clear()

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            with self._store.lock:
                self._collect_garbage()
                for node in self._store.of("nodes"):
                    self._watch_node(node)
                for job in self._store.of("jobs"):
                    self._jobs.turn(job)
                for pod in self._store.of("pods"):
                    self._follow(pod)
                for claim in self._store.of("persistentvolumeclaims"):
                    self._bind(claim)

    def _collect_garbage(self) -> None:
        """Delete what has lost its owner, and before an owner that is deleted in the foreground what it owns."""
        everything = [(kind, one) for kind in ("jobs", "pods", "services") for one in self._store.of(kind)]
        uids = {one["metadata"]["uid"] for _, one in everything}
        last = {one["metadata"]["uid"] for _, one in everything if FOREGROUND in one["metadata"].get("finalizers", [])}
        owned: set[str] = set()
        for kind, one in everything:
            own = owners(one)
            owned |= own
            if own and (not own & uids or own & last) and "deletionTimestamp" not in one["metadata"]:
                self._store.delete(kind, one)
            if own and not own & uids:
                release(self._store, kind, one, TRACKING)
        for kind, one in everything:
            if one["metadata"]["uid"] in last - owned:
                release(self._store, kind, one, FOREGROUND)

    def _watch_node(self, node: Object) -> None:
        name = node["metadata"]["name"]
        lease = self._store.find("leases", "kube-node-lease", name)
        renewed = (lease or {}).get("spec", {}).get("renewTime", "")
        if self._renewed.get(name) != renewed:
            self._renewed[name] = renewed
            for other, renewals in self._others.items():
                renewals[name] += other != name
            self._others[name].clear()
        silence = max(self._others[name].values(), default=0)
        if silence >= self._silence and not has(node, "Ready", "Unknown"):
            message = "Kubelet stopped posting node status."
            condition(node, "Ready", "Unknown", "NodeStatusUnknown", message)
            self._store.put("nodes", node)
        spec = node.setdefault("spec", {})
        others = [taint for taint in spec.get("taints", []) if taint["key"] != _UNREACHABLE]
        taints = [{"key": _UNREACHABLE, "effect": effect, "timeAdded": now()} for effect in ("NoSchedule", "NoExecute")]
        if has(node, "Ready", "Unknown") != (len(others) < len(spec.get("taints", []))):
            spec["taints"] = others + (taints if has(node, "Ready", "Unknown") else [])
            if not spec["taints"]:
                del spec["taints"]
            self._store.put("nodes", node)

    def _follow(self, pod: Object) -> None:
        """Place a pod, or end one whose node is gone or unreachable for longer than it tolerates."""
        place = pod["spec"].get("nodeName")
        if not place:
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            else:
                placement.place(self._store, pod)
            return
        node = self._store.find("nodes", "", place)
        if node is None:
            disrupt(self._store, pod, "DeletionByPodGC", "PodGC: node no longer exists")
            self._end(pod)
        elif "deletionTimestamp" in pod["metadata"] or pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        elif any(_is_over(pod, taint) for taint in node["spec"].get("taints", [])):
            disrupt(self._store, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
            self._store.delete("pods", pod)

    def _end(self, pod: Object) -> None:
        """End a pod that no node can end; the Job that counts pods may hold it for a moment."""
        if pod["status"].get("phase") != "Failed" or pod["metadata"].get("deletionGracePeriodSeconds") != 0:
            pod["status"]["phase"] = "Failed"
            self._store.delete("pods", pod, grace_s=0)

    def _bind(self, claim: Object) -> None:
        volume = self._store.find("persistentvolumes", "", claim["spec"].get("volumeName", ""))
        phase = "Bound" if volume else "Pending"
        if claim.setdefault("status", {}).get("phase") != phase:
            claim["status"]["phase"] = phase
            self._store.put("persistentvolumeclaims", claim)


def disrupt(store: Store, pod: Object, reason: str, message: str) -> None:
    """Say why a pod is taken away."""
    if condition(pod, "DisruptionTarget", "True", reason, message):
        store.put("pods", pod)


def _is_over(pod: Object, taint: Object) -> bool:
    """Whether a pod no longer tolerates a taint that ends pods."""
    if taint["effect"] != "NoExecute":
        return False
    matching = [one for one in pod["spec"].get("tolerations", []) if placement.tolerates(one, taint)]
    if not matching:
        return True
    limits = [one["tolerationSeconds"] for one in matching if "tolerationSeconds" in one]
    added_s = datetime.fromisoformat(taint["timeAdded"].replace("Z", "+00:00")).timestamp()
    return bool(limits) and time.time() - added_s >= min(limits)
