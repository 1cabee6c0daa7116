"""The launchers of one machine: the local one and the simulated one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conf.schema import Config
from flows import pretrain
from flows.launch.base import Handle, Job
from flows.launch.local import LocalLauncher
from flows.simulation.cluster import Script, SimulatedCluster, SimulatedLauncher
from flows.simulation.jobs import SCRIPTS
from tests.flows.launch.contract import Contract, ProcessContract, python_job

pytestmark = pytest.mark.processes


class TestLocal(ProcessContract):
    def launcher(self) -> LocalLauncher:
        return LocalLauncher()

    def job(self, folder: Path, code: str) -> Job:
        return python_job(folder, code)

    def dies_while_it_submits(self) -> str:
        return "from flows.launch.local import LocalLauncher\nlauncher = LocalLauncher()"


class TestSimulated(Contract):
    @pytest.fixture(autouse=True)
    def cluster(self, simulated_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self._config = simulated_config
        self._cluster = SimulatedCluster(pretrain.create(simulated_config, argv=[]), simulated_config, SCRIPTS)
        monkeypatch.setattr("time.sleep", self._cluster.clock.sleep)
        monkeypatch.setattr("time.monotonic", self._cluster.clock.now_unix_s)
        monkeypatch.setitem(SCRIPTS, "try", _plays)

    def launcher(self) -> SimulatedLauncher:
        return SimulatedLauncher(self._config, self._cluster)

    def job(self, folder: Path, code: str) -> Job:
        return python_job(folder, code)

    def runs(self, handle: Handle, job: Job) -> None:
        time.sleep(1)
        assert self.launcher().status(handle).state == "running"


def _plays(cluster: SimulatedCluster, job: Job) -> Script:
    """A job that ends as its code says, or sleeps."""
    cluster.end_with(job, "", None)
    yield 600.0 if "sleep" in job.argv[1] else 1.0
    return int(job.argv[1].rpartition("(")[2].rstrip(")"))
