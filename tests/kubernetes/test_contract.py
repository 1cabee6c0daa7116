"""The Kubernetes launcher does what every launcher must do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.base import Handle, Job
from flows.launch.kubernetes.launcher import KubernetesLauncher
from tests.flows.launch.contract import ClusterContract, python_job
from tests.kubernetes.lab import Lab

pytestmark = pytest.mark.processes


class TestKubernetes(ClusterContract):
    @pytest.fixture(autouse=True)
    def idle(self, lab: Lab) -> Iterator[None]:
        self._lab = lab
        yield
        lab.clear()

    def launcher(self) -> KubernetesLauncher:
        settings = KubernetesConfig(image="none", python=sys.executable, grace_s=5, lost_after_s=1)
        return KubernetesLauncher(ClusterConfig(launcher="kubernetes", nodes=2, kubernetes=settings))

    def job(self, folder: Path, code: str) -> Job:
        return python_job(folder, code, nodes=2, PYTHONUNBUFFERED="1")

    def cancel_from_outside(self, handle: Handle) -> None:
        self._lab.kubectl("delete", "jobs", "--all", "--wait=false")

    def dies_while_it_submits(self) -> str:
        """It dies as soon as the server has answered."""
        return f"""
from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.kubernetes.launcher import KubernetesLauncher
settings = KubernetesConfig(image="none", python={sys.executable!r}, grace_s=5, lost_after_s=1)
launcher = KubernetesLauncher(ClusterConfig(launcher="kubernetes", nodes=2, kubernetes=settings))
create = launcher._api.create
def dies(text):
    create(text)
    os.kill(os.getpid(), 9)
launcher._api.create = dies
"""
