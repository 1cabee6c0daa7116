"""The cost of asking a Kubernetes cluster about one running job of ``HLATCTL_BENCH_PODS`` pods.

Asks the stand-in of ``tests/kubernetes`` through kubectl, once for all pods and once for the Job alone. Prints for each
the bytes that kubectl printed, the processor time of kubectl and that of this process. No pod runs.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.base import Job
from flows.launch.kubernetes.api import Api
from flows.launch.kubernetes.launcher import KubernetesLauncher
from flows.launch.kubernetes.manifest import manifest, submitted, text_of
from tests.kubernetes.control_plane import write_kubeconfig
from tests.kubernetes.controllers import pod_of
from tests.kubernetes.standin import Standin

TOKEN = "0123456789abcdef0123456789abcdef"
#: What a pod that runs has in a real cluster.
RUNS: dict[str, Any] = {
    "phase": "Running",
    "conditions": [
        {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ],
    "containerStatuses": [
        {
            "name": "node",
            "image": "registry/hlatctl@sha256:" + 64 * "0",
            "imageID": "registry/hlatctl@sha256:" + 64 * "0",
            "containerID": "containerd://" + 64 * "0",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            "lastState": {},
        }
    ],
    "hostIP": "10.0.0.1",
    "podIP": "10.0.0.2",
    "startTime": "2026-01-01T00:00:00Z",
}


def fill(standin: Standin, pods: int, cluster: ClusterConfig) -> None:
    """Give the cluster a job whose pods all run."""
    folder = Path("/fsx/runs/a-run-with-a-name")
    job = Job(
        name="train",
        run_dir=folder,
        argv=("-m", "trainer", "--run-dir", str(folder), "--attempt", "1"),
        launch_dir=folder / "launch" / "attempt-0001",
        log_dir=folder / "logs" / "attempt-0001",
        nodes=pods,
        processes_per_node=32,
    )
    _, work = yaml.safe_load_all(submitted(text_of(manifest(job, cluster)), TOKEN))
    work = standin.store.create("jobs", "default", {**work, "status": {"active": pods, "ready": pods}})
    for rank in range(pods):
        pod = pod_of(work, rank)
        pod["spec"]["nodeName"] = f"ip-10-0-{rank // 256}-{rank % 256}.ec2.internal"
        standin.store.create("pods", "default", {**pod, "status": RUNS})


def measure(name: str, ask: Callable[[], object], printed: list[int]) -> None:
    printed.clear()
    began, own_s, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.thread_time(), time.monotonic()
    ask()
    own_s, wall_s = time.thread_time() - own_s, time.monotonic() - wall_s
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    kubectl_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    print(f"{name}: {sum(printed):,} bytes, kubectl {kubectl_s:.3f} s, own {own_s:.3f} s, wall {wall_s:.2f} s")


def run() -> None:
    pods = int(os.environ.get("HLATCTL_BENCH_PODS", "2048"))
    cluster = ClusterConfig(launcher="kubernetes", nodes=pods, kubernetes=KubernetesConfig(image="hlatctl"))
    printed: list[int] = []
    ask = Api.run

    def counted(self: Api, *words: str, text: str | None = None) -> str:
        said = ask(self, *words, text=text)
        printed.append(len(said))
        return said

    Api.run = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        standin = Standin(Path(folder), ())
        standin.start(controllers=False)
        fill(standin, pods, cluster)
        os.environ["KUBECONFIG"] = str(write_kubeconfig(Path(folder), standin.client()))
        launcher = KubernetesLauncher(cluster)
        launcher._version(TOKEN)  # kubectl reads the server's kinds once
        measure("all pods", lambda: launcher._list(TOKEN), printed)
        measure("the Job's version", lambda: launcher._version(TOKEN), printed)
        standin.stop()
