"""Jobs on a Kubernetes cluster, without a controller: created, read and deleted through kubectl.

A job's token is on the disk before the job is created, and labels all of the job's objects. So a driver that dies while
it creates a job leaves either no job, or one that the next driver finds. A job's name follows from its place, so the
cluster itself refuses a second one.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from typing import Any, Self

from conf.schema import ClusterConfig, Config
from flows.launch.base import AwayError, Handle, Job, JobPlan, Launcher, Status, writing
from flows.launch.endings import (
    NodeRecord,
    base_of,
    conclude,
    give_up,
    has_ended,
    node_records,
    order,
    order_stacks,
    prepare,
    read_token,
)
from flows.launch.kubernetes.api import Api, RefusedError, check_limits
from flows.launch.kubernetes.manifest import TOKEN_LABEL, manifest, object_name, submitted, text_of
from flows.launch.kubernetes.pods import (
    Pod,
    Seen,
    all_good,
    code_of,
    is_ours,
    is_ready,
    is_usable,
    newest_event,
    nodes_of,
    ordered,
    pod_of,
    version_of,
    was_asked,
)
from hlatctl.run.errors import ConfigError, LaunchError

_POLL_S = 0.5
#: Seconds between two queries about the same job; records on the disk answer sooner.
_ASK_EVERY_S = 2.0
#: While the Job's version stays the same: share of the time for listing its pods, and longest interval in seconds.
_LIST_FRACTION, _LIST_EVERY_S = 0.1, 30.0
_HOSTS_FOR_S = 60.0
#: Time for the programs of nodes to end their processes, before the cluster is asked to end the pods.
_END_S = 30.0
#: A node that doesn't answer the cluster, but sees the run directory, has obeyed the order to end after this time.
_FENCED_AFTER_S = 10.0
_SUSPENDED, _WAS_SUSPENDED = "suspended", "its Job was suspended"
#: What a patch must not change, because the launcher relies on it.
_KEPT = (("metadata", "name"), ("spec", "completions"), ("spec", "parallelism"))
Object = dict[str, Any]


class KubernetesLauncher(Launcher):
    """Starts jobs on a Kubernetes cluster."""

    name = "kubernetes"

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster, self._api = cluster, Api(cluster.kubernetes)
        self._seen: dict[str, Seen] = {}
        self._asked_s: dict[str, float] = {}
        self._ordered_s: dict[str, float] = {}
        self._hosts: tuple[str, ...] = ()
        self._hosts_asked_s = -_HOSTS_FOR_S

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the launcher of a configuration (``conf.registries.LAUNCHERS``)."""
        return cls(config.cluster)

    def check_limits(self, config: Config) -> str:
        """Compare a pod with the cluster's nodes."""
        return check_limits(config.cluster)

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the cluster's nodes with the requested labels that can run pods, whether or not one runs there now."""
        if time.monotonic() - self._hosts_asked_s >= _HOSTS_FOR_S:
            try:
                known = self._api.list("nodes")
            except AwayError:
                return self._hosts
            usable = (one["metadata"]["name"] for one in known if is_usable(one, self._cluster.kubernetes))
            self._hosts, self._hosts_asked_s = tuple(sorted(usable)), time.monotonic()
        return self._hosts

    def render(self, job: Job) -> JobPlan:
        """Return the job as a manifest.

        Raises:
            ConfigError: the configuration's patch doesn't fit.
        """
        objects, patch = manifest(job, self._cluster), self._cluster.kubernetes.patch
        if patch:
            objects[-1] = self._patched(objects[-1], patch)
        return JobPlan(job=job, script=text_of(objects), script_path=job.launch_dir / f"{job.name}.yaml")

    def _patched(self, work: Object, patch: Object) -> Object:
        words = (
            "patch",
            "--local",
            "--filename=-",
            "--type=strategic",
            f"--patch={json.dumps(patch)}",
            "--output=json",
        )
        try:
            patched: Object = json.loads(self._api.run(*words, text=json.dumps(work)))
            submitted(text_of([work, patched]), "")  # kubectl also merges patches that give no valid Job
            pod = patched["spec"]["template"]["spec"]
            if pod.get("hostNetwork"):  # else its pods query the node's name server, which knows no Service
                pod.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
            kept = all(patched[part][key] == work[part][key] for part, key in _KEPT)
            problem = "" if kept else "it must not change the Job's name or the number of its pods"
        except RefusedError as error:
            problem = error.message
        except (KeyError, TypeError, IndexError, AttributeError):
            problem = "the result is no Job with a container"
        if problem:
            raise ConfigError(
                f"cluster.kubernetes.patch={patch}: {problem}",
                hint="write it as a part of a Job, such as {spec: {template: {spec: {hostNetwork: true}}}}",
            )
        return patched

    def submit(self, plan: JobPlan) -> Handle:
        """Create the job, and return once the cluster has accepted it. An older job of this place is removed first."""
        handle, token = self.handle(plan), uuid.uuid4().hex
        self._remove(handle)
        with writing(plan.job):
            prepare(plan, token)
        name, uid = object_name(handle.launch_dir, handle.name), self._api.create(submitted(plan.script, token))
        with contextlib.suppress(LaunchError):  # the Job runs; without an owner its Service is removed by _remove only
            self._api.own("service", name, {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid})
        self._seen.clear()
        return handle

    def status(self, handle: Handle) -> Status:
        """Return the state from the records of its nodes if all have ended, else from its pods.

        If a node was lost, the rest of the job is ended here: its other pods would wait for that node.
        """
        base = base_of(handle)
        token, records = read_token(base), node_records(base)
        nodes = nodes_of(base)
        # After a request from outside, the cluster knows the reason.
        if all_good(records, nodes) and (is_ours(base) or not any(record.asked_to_stop for record in records)):
            return conclude("", 0, records)
        if not token:
            return conclude("", None, records)
        try:
            seen = self._look(token, now=bool(records) and all(record.code is not None for record in records))
            if seen.suspended and records and (seen := self._look(token, now=True)).suspended:
                return self._suspended(handle, seen, records)
            return self._live(handle, seen, nodes) or self._conclude(handle, seen, nodes)
        except AwayError as error:
            return Status(state="unknown", reason=error.message)

    def _live(self, handle: Handle, seen: Seen, nodes: int) -> Status | None:
        if seen.work is None and not seen.pods:
            return None
        if seen.lost:
            self._end_rest(handle, seen)
        waiting = [pod for pod in seen.pods if pod.phase == "Pending" and not pod.deleting]
        remaining = [pod for pod in seen.pods if not pod.ended and not self._is_gone(handle, seen, pod)]
        hosts = tuple(pod.host for pod in sorted(seen.pods, key=lambda pod: pod.rank) if pod.host)
        if seen.failed or seen.lost:
            return Status(state="running", hosts=hosts) if remaining else None
        if len(seen.pods) < nodes and seen.alive:
            return Status(state="queued", reason=self._why_suspended(seen))
        if waiting:
            return Status(state="queued", reason=waiting[0].reason or self._why_it_starts_not(waiting[0]))
        return Status(state="running", hosts=hosts) if remaining else None

    def _suspended(self, handle: Handle, seen: Seen, records: list[NodeRecord]) -> Status:
        """Remove a job whose nodes a queue has taken while it ran, so that it never starts a second time."""
        if not all(pod.ended for pod in seen.pods):
            return Status(state="running", hosts=tuple(pod.host for pod in seen.pods if pod.host))
        give_up(base_of(handle))
        order(base_of(handle), _SUSPENDED)  # nobody obeys this: it records why the Job is gone
        self._api.delete("job", seen.name)
        return conclude("preempted", None, records, reason=_WAS_SUSPENDED)

    def _end_rest(self, handle: Handle, seen: Seen) -> None:
        """End a job that lost a node, also on that node if it still sees the run directory."""
        self._fence(handle)
        if seen.alive:
            self._api.delete("job", seen.name)

    def _fence(self, handle: Handle) -> None:
        """Order the nodes to end the job, once: those that the cluster can't reach may still write to the storage."""
        base = base_of(handle)
        if read_token(base) not in self._ordered_s:
            order(base, "end")
            self._ordered_s[read_token(base)] = time.monotonic()

    def _is_gone(self, handle: Handle, seen: Seen, pod: Pod) -> bool:
        """Return whether nothing of a pod runs on its lost node: the node said so, or had time to obey the order."""
        if pod not in seen.lost:
            return False
        base = base_of(handle)
        ordered_s = self._ordered_s.get(read_token(base))
        fenced = ordered_s is not None and time.monotonic() - ordered_s >= _FENCED_AFTER_S
        return fenced or has_ended(base, pod.rank)

    def _why_suspended(self, seen: Seen) -> str:
        """Return that a job waits in a queue, with Kueue's reason: it says as an event which quota is missing."""
        queue = self._cluster.kubernetes.queue
        if not (seen.suspended and queue):
            return ""
        events = self._api.list("events", field="involvedObject.kind=Workload,reason=Pending")
        own = [one for one in events if one["involvedObject"]["name"].startswith(f"job-{seen.name}-")]
        why = newest_event(own).partition(": ")[2]
        return f"waits in Kueue's queue {queue}" + (f": {why}" if why else "")

    def _why_it_starts_not(self, pod: Pod) -> str:
        return newest_event(self._api.list("events", field=f"involvedObject.name={pod.name}"))

    def _conclude(self, handle: Handle, seen: Seen, nodes: int) -> Status:
        base, pods = base_of(handle), sorted(seen.pods, key=lambda pod: pod.rank)
        records = node_records(base, nodes)
        # Pods that were ended are gone, and a pod without a record can't see the run directory.
        hosts = tuple(dict.fromkeys([*(one.host for one in records), *(pod.host for pod in pods if pod.started)]))
        ended_by_node = (pod.host for pod in seen.disrupted if pod.verdict == "node_failed")
        down = tuple(dict.fromkeys([*(pod.host for pod in seen.lost), *ended_by_node]))
        disrupted = next(iter(seen.disrupted), None)
        verdict = "node_failed" if down else disrupted.verdict if disrupted else ""
        reason = disrupted.reason if disrupted else ""
        if not verdict and ordered(base) == _SUSPENDED:
            verdict, reason = "preempted", _WAS_SUSPENDED
        elif not verdict and not is_ours(base) and was_asked(records):
            # Somebody else deleted the Job or a pod, and the object that recorded the reason is gone.
            verdict, reason = ("preempted", "a pod was asked to end") if seen.alive else ("cancelled", "")
        return conclude(verdict, code_of(pods, records, nodes), records, down, reason, hosts)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask the nodes' programs to stop the job, delete it after the grace, and return when its pods have ended."""
        base = base_of(handle)
        token = read_token(base)
        if not token:
            return
        seen = self._patiently(token)
        if grace_s and any(pod.phase == "Running" for pod in seen.pods) and not order(base, "stop"):
            self._await_end(handle, grace_s)
        if self._alive(token):
            order(base, "end")
            self._await_end(handle, _END_S if grace_s == 0 else 0)
        self._remove(handle)
        if len(node_records(base)) < nodes_of(base):  # a dead driver's create request may arrive late
            give_up(base)

    def _remove(self, handle: Handle) -> None:
        """Delete a job and its pods; those of lost nodes are removed once nothing of them can run."""
        token, name = read_token(base_of(handle)), object_name(handle.launch_dir, handle.name)
        while token and (seen := self._patiently(token)).exists:
            self._api.delete("job", name)
            self._api.delete("service", name)
            if seen.lost:
                self._fence(handle)
            for pod in seen.lost:
                if self._is_gone(handle, seen, pod):
                    self._api.delete("pod", pod.name, grace_s=0)
            time.sleep(_POLL_S)

    def _await_end(self, handle: Handle, patience_s: float) -> None:
        deadline, token = time.monotonic() + patience_s, read_token(base_of(handle))
        while time.monotonic() < deadline and self._alive(token):
            time.sleep(_POLL_S)

    def _alive(self, token: str) -> bool:
        seen = self._patiently(token)
        return any(not pod.ended and pod not in seen.lost for pod in seen.pods)

    def dump_stacks(self, handle: Handle) -> str:
        """Ask the nodes' programs, which signal the ranks below them."""
        return order_stacks(base_of(handle))

    def _look(self, token: str, *, now: bool = False) -> Seen:
        """Return what the cluster has of a job; a recent answer counts unless ``now``."""
        if now or not (seen := self._seen.get(token)):
            return self._list(token)
        if time.monotonic() - self._asked_s[token] < _ASK_EVERY_S:
            return seen
        if time.monotonic() - seen.time_s >= _listed_every_s(seen) or self._version(token) != seen.version:
            return self._list(token)
        self._asked_s[token] = time.monotonic()
        return seen

    def _version(self, token: str) -> str:
        """Return the version of a Job. It changes when one of its pods starts, ends or is asked to end."""
        works = self._api.list("jobs", label=f"{TOKEN_LABEL}={token}")
        return version_of(works[0]) if works else ""

    def _list(self, token: str) -> Seen:
        """List the job and all of its pods: 20 MB and 2 s of processor time for 2,048 pods."""
        began_s = time.monotonic()
        objects = self._api.list("jobs,pods", label=f"{TOKEN_LABEL}={token}")
        pods = [pod_of(one) for one in objects if one["kind"] == "Pod"]
        works = [one for one in objects if one["kind"] == "Job"]
        before = self._seen.get(token)
        seen = Seen(works[0] if works else None, pods, self._lost(pods), before.disrupted if before else [])
        seen.took_s = time.monotonic() - began_s
        self._seen[token], self._asked_s[token] = seen, seen.time_s
        return seen

    def _lost(self, pods: list[Pod]) -> list[Pod]:
        suspects = [pod for pod in pods if pod.deleting and pod.host and not pod.ended]
        if not suspects:
            return []
        ready = {one["metadata"]["name"] for one in self._api.list("nodes") if is_ready(one)}
        return [pod for pod in suspects if pod.host not in ready]

    def _patiently(self, token: str) -> Seen:
        while True:
            try:
                return self._look(token, now=True)
            except AwayError:
                time.sleep(_POLL_S)


def _listed_every_s(seen: Seen) -> float:
    """Return how long a list of pods stays valid: for few pods, until the next query."""
    return min(_LIST_EVERY_S, seen.took_s / _LIST_FRACTION)
