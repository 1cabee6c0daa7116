"""Nodes of a Kubernetes cluster on this machine: each plays a kubelet for the API server and runs pods as processes.

It knows what the launcher's pods need: environment, termination with grace, exit codes, and the ends of nodes. Images,
volumes and networks are this machine's own.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
_POLL_S = 0.1
_RENEW_S = 1.0
_FIELD = re.compile(r"metadata\.(annotations|labels)\['(.*)'\]")


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client of an API server, with its administrator's token."""

    url: str
    token: str

    def ask(self, method: str, path: str, body: Object | None = None) -> Object:
        """Return the answer to a request; a body is created, replaced or merged.

        Raises:
            urllib.error.URLError: the server refuses, or is away.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": kind},
            method=method,
        )
        with self._opener.open(request, timeout=10) as answer:
            return dict(json.loads(answer.read()))

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """Return one without proxies: threads can't read the environment, which pytest changes."""
        https = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), https)


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    log: Path
    kill_at_s: float | None = None
    reason: str = "Error"


@dataclass
class Node:
    """One node: answers the API server until it is cut off."""

    name: str
    reaches_server: bool = True
    pods: dict[str, _Running] = field(default_factory=dict)


class Kubelets:
    """All nodes of a cluster, in one thread.

    Args:
        folder: for the logs of pods.
    """

    def __init__(self, client: Client, names: list[str], folder: Path) -> None:
        self._client, self._folder = client, folder
        self.nodes = {name: Node(name) for name in names}
        self._stopping, self._renewed_s = threading.Event(), -_RENEW_S
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kubelets", daemon=True)

    def start(self) -> None:
        for name in self.nodes:
            self._register(name)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for node in self.nodes.values():
            self._kill(node)

    def cut(self, name: str) -> None:
        with self._lock:
            self.nodes[name].reaches_server = False
            self._kill(self.nodes[name])

    def isolate(self, name: str) -> None:
        """Cut a node off from the API server; its pods run on."""
        with self._lock:
            self.nodes[name].reaches_server = False

    def kill_for_memory(self, name: str) -> None:
        """Kill the pods of a node as its kernel does if they take more memory than their limit."""
        with self._lock:
            for running in self.nodes[name].pods.values():
                running.reason = "OOMKilled"
                with suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)

    def is_busy(self, name: str) -> bool:
        return any(running.process.poll() is None for running in self.nodes[name].pods.values())

    @property
    def printed(self) -> str:
        return "".join(one.log.read_text() for node in self.nodes.values() for one in list(node.pods.values()))

    def boot(self, name: str) -> None:
        """Start a node again: pods that ran there have failed."""
        with self._lock:
            self._kill(self.nodes[name])
            self.nodes[name] = Node(name)
            self._register(name)

    def _kill(self, node: Node) -> None:
        for running in node.pods.values():
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()

    def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        with suppress(urllib.error.HTTPError):
            self._client.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        lease = {"metadata": {"name": name}, "spec": {"holderIdentity": name, "leaseDurationSeconds": 5}}
        with suppress(urllib.error.HTTPError):
            self._client.ask("POST", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease)
        self._renew(name)

    def _renew(self, name: str) -> None:
        seconds = time.time()
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}
        ready |= {"lastHeartbeatTime": f"{now}Z", "lastTransitionTime": f"{now}Z"}
        room = {"cpu": "64", "memory": "512Gi", "pods": "100", "nvidia.com/gpu": "8"}
        status = {"conditions": [ready], "capacity": room, "allocatable": room}
        self._client.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})
        lease = {"spec": {"renewTime": f"{now}.{int(seconds % 1 * 1e6):06d}Z"}}
        self._client.ask("PATCH", f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}", lease)

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            with self._lock, suppress(OSError, http.client.HTTPException):
                self._turn()

    def _turn(self) -> None:
        if time.monotonic() - self._renewed_s >= _RENEW_S:
            self._renewed_s = time.monotonic()
            for node in self.nodes.values():
                if node.reaches_server:
                    self._renew(node.name)
        pods = self._client.ask("GET", "/api/v1/pods")["items"]
        for pod in pods:
            place = self.nodes.get(pod["spec"].get("nodeName", ""))
            if place and place.reaches_server:
                self._tend(place, pod)
        self._end_orphans({pod["metadata"]["uid"] for pod in pods})

    def _end_orphans(self, known: set[str]) -> None:
        """End the programs of pods that the server no longer has, such as those that were deleted by force."""
        for node in self.nodes.values():
            for uid, running in node.pods.items() if node.reaches_server else ():
                if uid not in known and running.process.poll() is None:
                    self._terminate(running, 0)

    def _tend(self, node: Node, pod: Object) -> None:
        uid, path = pod["metadata"]["uid"], _path(pod)
        running, deleting = node.pods.get(uid), "deletionTimestamp" in pod["metadata"]
        if running is None:
            if deleting:
                self._client.ask("PATCH", f"{path}/status", {"status": {"phase": "Failed"}})
                self._client.ask("DELETE", path, {"gracePeriodSeconds": 0})
            elif pod["status"].get("phase") == "Pending":
                self._start(node, pod)
            elif pod["status"].get("phase") == "Running":
                self._ended(pod, 255)  # it ran before this node was started again
            return
        code, phase = running.process.poll(), pod["status"].get("phase")
        if code is None and deleting:
            self._terminate(running, int(pod["metadata"].get("deletionGracePeriodSeconds", 30)))
        elif code is None and phase == "Pending":
            self._started(pod)  # the server did not answer the first time
        elif code is not None and phase in ("Pending", "Running"):
            self._ended(pod, 128 - code if code < 0 else code, running.reason)
        elif code is not None and deleting:
            self._client.ask("DELETE", path, {"gracePeriodSeconds": 0})

    def _start(self, node: Node, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        if container["image"] == "missing":
            waits = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "missing"'}
            return self._report(pod, {"phase": "Pending"}, {"waiting": waits}, ready=False)
        env = {one["name"]: _value(one, pod) for one in container.get("env", [])}
        words = [_expanded(word, env) for word in [*container["command"], *container.get("args", [])]]
        # The names of pods resolve to this machine.
        env |= {name: "127.0.0.1" for name in env if name.endswith("MASTER_ADDR")}
        log = self._folder / f"{pod['metadata']['uid']}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        node.pods[pod["metadata"]["uid"]] = _Running(process, log)
        self._started(pod)

    def _started(self, pod: Object) -> None:
        started = {"running": {"startedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        self._report(pod, {"phase": "Running"}, started, ready=True)

    def _terminate(self, running: _Running, grace_s: int) -> None:
        """As in a container: process 1 is asked, and all are killed after the grace."""
        kill_at_s = time.monotonic() + grace_s
        if running.kill_at_s is None:
            running.kill_at_s = kill_at_s
            with suppress(ProcessLookupError):
                os.kill(running.process.pid, signal.SIGTERM)
        running.kill_at_s = min(running.kill_at_s, kill_at_s)
        if time.monotonic() >= running.kill_at_s:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)

    def _ended(self, pod: Object, code: int, reason: str = "Error") -> None:
        ended = {"exitCode": code, "reason": reason if code else "Completed"}
        self._report(pod, {"phase": "Failed" if code else "Succeeded"}, {"terminated": ended}, ready=False)

    def _report(self, pod: Object, status: Object, state: Object, *, ready: bool) -> None:
        container = pod["spec"]["containers"][0]
        one = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        value = {**status, "containerStatuses": [{**one, "ready": ready, "state": state}]}
        self._client.ask("PATCH", f"{_path(pod)}/status", {"status": value})


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _value(variable: Object, pod: Object) -> str:
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
    if path == "spec.nodeName":
        return str(pod["spec"]["nodeName"])
    named = _FIELD.fullmatch(path)
    return str(pod["metadata"][named[1]][named[2]] if named else variable.get("value", ""))


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` and ``$$`` as a kubelet does (Kubernetes, "Define Dependent Environment Variables")."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)
