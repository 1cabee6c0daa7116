"""The Slurm launcher does what every launcher must do, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import ClusterConfig
from flows.launch.base import Job
from flows.launch.slurm.launcher import SlurmLauncher
from tests.flows.launch.contract import ProcessContract, python_job
from tests.slurm.lab import Lab

pytestmark = pytest.mark.processes


class TestSlurm(ProcessContract):
    @pytest.fixture(autouse=True)
    def idle(self, lab: Lab) -> Iterator[None]:
        lab.wait_until_idle()
        yield
        lab.command("scancel", "--user=root")

    def launcher(self) -> SlurmLauncher:
        return SlurmLauncher(ClusterConfig(launcher="slurm", nodes=2))

    def job(self, folder: Path, code: str) -> Job:
        return python_job(folder, code, nodes=2, PYTHONUNBUFFERED="1")

    def dies_while_it_submits(self) -> str:
        """It dies as soon as sbatch has answered."""
        return """
from conf.schema import ClusterConfig
from flows.launch.slurm import launcher as module
real = module.slurm
def dies(*words):
    answer = real(*words)
    if words[0] == "sbatch":
        os.kill(os.getpid(), 9)
    return answer
module.slurm = dies
launcher = module.SlurmLauncher(ClusterConfig(launcher="slurm"))
"""
