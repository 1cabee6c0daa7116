"""A Kubernetes cluster on this machine for all tests of this folder: its control plane and its nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.kubernetes.control_plane import ControlPlane, missing, write_kubeconfig
from tests.kubernetes.kubelets import Kubelets
from tests.kubernetes.standin import Standin
from tests.waiting import wait_for

#: A claim named ``shared``, bound to a volume; pods are processes of this machine and see all of its folders.
_VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: shared}
spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteMany], storageClassName: "", hostPath: {path: /}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec: {accessModes: [ReadWriteMany], storageClassName: "", volumeName: shared, resources: {requests: {storage: 1Gi}}}
"""
NODES = ("n1", "n2", "n3", "n4")
#: ``real``: the tests run on a real control plane, whose programs are on the PATH.
WHICH = "HLATCTL_TEST_KUBERNETES"
#: Has only the rights that a test gives.
DRIVER = "driver"


def why_not() -> str:
    """Return why there can be no cluster here; empty if there can."""
    programs = [name for name in ("kubectl", "openssl") if shutil.which(name) is None]
    lacking = programs + (missing() if _is_real() else [])
    return f"needs {', '.join(lacking)}" if lacking else ""


def _is_real() -> bool:
    return os.environ.get(WHICH) == "real"


class Lab:
    """A cluster of four nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = ControlPlane(folder, (DRIVER,)) if _is_real() else Standin(folder, (DRIVER,))
        self.nodes = Kubelets(self.server.client(), list(NODES), folder)

    @property
    def env(self) -> dict[str, str]:
        """Variables with which kubectl finds the cluster."""
        return {"KUBECONFIG": str(write_kubeconfig(self._folder, self.server.client()))}

    def start(self) -> None:
        self.server.start()
        # A server creates its own namespaces after it is ready; the nodes' leases need one of them.
        wait_for(
            lambda: len(self.kubectl("get", "namespaces", "default", "kube-node-lease", "--output=name").split()) == 2
        )
        self.nodes.start()
        self.kubectl("create", "--filename=-", text=_VOLUME)
        wait_for(lambda: all(self.is_idle(name) for name in NODES))

    def stop(self) -> None:
        self.nodes.stop()
        self.server.stop()

    def is_idle(self, node: str) -> bool:
        """Whether a node is ready and untainted, and no pod is there."""
        state = self.kubectl(
            "get", "node", node, "--output=jsonpath={.status.conditions[?(@.type=='Ready')].status}{.spec.taints}"
        )
        pods = self.kubectl("get", "pods", f"--field-selector=spec.nodeName={node}", "--output=name")
        return state == "True" and not pods

    def clear(self) -> None:
        """Delete all jobs; returns when they are gone and the nodes are idle."""
        self.kubectl("delete", "jobs,services", "--wait=false", "--selector=app.kubernetes.io/managed-by=hlatctl")
        for name, node in self.nodes.nodes.items():
            if not node.reaches_server:
                self.nodes.boot(name)
        wait_for(lambda: not self.kubectl("get", "jobs", "--output=name"))
        wait_for(lambda: all(self.is_idle(name) for name in NODES))

    def kubectl(self, *words: str, text: str = "") -> str:
        env = {**os.environ, **self.env}
        done = subprocess.run(("kubectl", *words), input=text, check=False, capture_output=True, text=True, env=env)
        return done.stdout.strip()
