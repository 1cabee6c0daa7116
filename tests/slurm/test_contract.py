"""The Slurm launcher does what every launcher must do, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import ClusterConfig
from flows.launch.base import Handle, Job
from flows.launch.slurm.launcher import SlurmLauncher
from flows.launch.slurm.script import job_name
from tests.flows.launch.contract import ClusterContract, python_job
from tests.slurm.lab import Lab

pytestmark = pytest.mark.processes


class TestSlurm(ClusterContract):
    @pytest.fixture(autouse=True)
    def idle(self, lab: Lab) -> Iterator[None]:
        self._lab = lab
        lab.wait_until_idle()
        yield
        lab.command("scancel", "--user=root")

    def launcher(self) -> SlurmLauncher:
        return SlurmLauncher(ClusterConfig(launcher="slurm", nodes=2))

    def job(self, folder: Path, code: str) -> Job:
        return python_job(folder, code, nodes=2, PYTHONUNBUFFERED="1")

    def cancel_from_outside(self, handle: Handle) -> None:
        self._lab.command("scancel", f"--name={job_name(handle.launch_dir, handle.name)}")

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
