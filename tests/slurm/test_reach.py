"""A drill's signals reach the processes of a job on its last node, which is then the one to blame."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config
from flows.drill.arena import OnSlurm
from flows.launch.base import Handle, Job, Status
from flows.launch.slurm.launcher import SlurmLauncher
from hlatctl.run.errors import LaunchError
from tests.slurm.lab import Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

#: Starts one process like a training process, and ends with its code.
TRAINS = """
import os, subprocess, sys
code = "import time; print('started', flush=True); time.sleep(600)"
sys.exit(-subprocess.run([sys.executable, "-c", code], env={**os.environ, "RANK": os.environ["NODE_RANK"]}).returncode)
"""


@pytest.fixture
def config() -> Config:
    return Config(cluster=ClusterConfig(launcher="slurm", nodes=2))


def started(launcher: SlurmLauncher, folder: Path) -> Handle:
    place = folder / uuid.uuid4().hex[:6]
    argv = ("-c", TRAINS)
    own = {"run_dir": place, "launch_dir": place / "launch", "log_dir": place / "logs"}
    job = Job(name="train", argv=argv, each_node=True, nodes=2, **own)  # type: ignore[arg-type]
    handle = launcher.submit(launcher.render(job))
    wait_for(lambda: job.log.read_text().count("started") == 2)
    return handle


def ended(launcher: SlurmLauncher, handle: Handle) -> Status:
    wait_for(lambda: launcher.status(handle).ended)
    return launcher.status(handle)


def test_a_rank_that_is_killed_ends_its_job_which_nothing_reaches_after_that(
    lab: Lab, config: Config, tmp_path: Path
) -> None:
    launcher, reach = SlurmLauncher(config.cluster), OnSlurm(config)
    handle = started(launcher, tmp_path)
    reach.rank(handle, signal.SIGKILL)
    status = ended(launcher, handle)
    assert (status.state, status.exit_code) == ("failed", signal.SIGKILL)
    assert status.blamed_hosts == status.hosts[1:]
    with pytest.raises(LaunchError, match="does not run on node 1"):
        reach.rank(handle, signal.SIGKILL)


def test_a_job_is_cancelled_as_from_outside(lab: Lab, config: Config, tmp_path: Path) -> None:
    launcher = SlurmLauncher(config.cluster)
    handle = started(launcher, tmp_path)
    OnSlurm(config).cancel(handle)
    assert ended(launcher, handle).verdict == "cancelled"
