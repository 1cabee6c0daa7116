"""A real control plane of Kubernetes on loopback: etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

It needs these four programs. They are not packaged for Debian, so most machines lack them; there the stand-in takes
their place.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path

from tests.kubernetes.kubelets import Client
from tests.kubernetes.store import ADMIN
from tests.ports import free_ports
from tests.waiting import wait_for

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
#: A node that has not answered for so long is unreachable; a real cluster's default is 40 s.
_GRACE_S = 8


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


class ControlPlane:
    """A control plane with an empty cluster.

    Args:
        folder: for its files.
        users: users other than the administrator, with the rights that roles give them.
    """

    def __init__(self, folder: Path, users: tuple[str, ...]) -> None:
        self._folder, self._ports = folder, free_ports(5)
        self._tokens = {name: secrets.token_hex(16) for name in (ADMIN, *users)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def client(self, user: str = ADMIN) -> Client:
        return Client(url=f"https://127.0.0.1:{self._ports[2]}", token=self._tokens[user])

    def start(self) -> None:
        """Start all programs; returns when the server is ready."""
        folder, (clients, peers, _, manager, scheduler) = self._folder, self._ports
        lines = (
            f"{token},{name},{name}{',system:masters' * (name == ADMIN)}\n" for name, token in self._tokens.items()
        )
        (folder / "tokens.csv").write_text("".join(lines))
        key, public = folder / "sa.key", folder / "sa.pub"
        subprocess.run(("openssl", "genrsa", "-out", key, "2048"), check=True, capture_output=True)
        subprocess.run(("openssl", "rsa", "-in", key, "-pubout", "-out", public), check=True, capture_output=True)
        self._run(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{clients}",
            f"--advertise-client-urls=http://127.0.0.1:{clients}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
        )
        self.start_server()
        common = (f"--kubeconfig={write_kubeconfig(folder, self.client())}", "--leader-elect=false")
        self._run(
            "kube-controller-manager",
            *common,
            f"--service-account-private-key-file={key}",
            f"--node-monitor-grace-period={_GRACE_S}s",
            "--node-monitor-period=1s",
            f"--secure-port={manager}",
            "--bind-address=127.0.0.1",
        )
        self._run("kube-scheduler", *common, f"--secure-port={scheduler}", "--bind-address=127.0.0.1")

    def start_server(self) -> None:
        folder = self._folder
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._ports[0]}",
            f"--secure-port={self._ports[2]}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certs'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.pub'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        wait_for(self._is_ready)

    def stop_server(self) -> None:
        self._end("kube-apiserver")

    def stop(self) -> None:
        for name in list(self._running):
            self._end(name)

    def _end(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def _is_ready(self) -> bool:
        words = ("kubectl", f"--kubeconfig={write_kubeconfig(self._folder, self.client())}", "get", "--raw", "/readyz")
        return subprocess.run(words, check=False, capture_output=True).returncode == 0

    def _run(self, *words: str) -> None:
        with (self._folder / f"{words[0]}.log").open("ab") as log:
            self._running[words[0]] = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)


def write_kubeconfig(folder: Path, client: Client) -> Path:
    path = folder / "kubeconfig"
    path.write_text(
        f"""apiVersion: v1
kind: Config
clusters: [{{name: lab, cluster: {{server: "{client.url}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{token: {client.token}}}}}]
contexts: [{{name: lab, context: {{cluster: lab, user: admin, namespace: default}}}}]
current-context: lab
"""
    )
    return path
