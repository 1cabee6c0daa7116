"""Nodes that are kept between jobs, on a real Slurm: spare nodes, lost nodes, and drivers that die."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, SlurmConfig
from flows.launch.base import Job
from flows.launch.slurm import kept_nodes
from flows.launch.slurm.launcher import SlurmLauncher
from tests.flows.launch.contract import SLEEPS, end_of, fails, submit
from tests.slurm.lab import Lab
from tests.slurm.test_launcher import job, runs
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

CLUSTER = ClusterConfig(launcher="slurm", nodes=2, spare_nodes=1, slurm=SlurmConfig())


def in_turn(first: Job, name: str, code: str, **values: object) -> Job:
    """A job of the same run that runs on the kept nodes."""
    return dataclasses.replace(first, name=name, argv=("-c", code), keeps_nodes=True, **values)  # type: ignore[arg-type]


def dies_after_sbatch(what: Job) -> None:
    """Submit a job with a driver that is killed as soon as Slurm has the allocation."""
    driver = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from flows.launch.slurm import kept_nodes as module
real = module.slurm
def dies(*words):
    real(*words)
    if words[0] == "sbatch":
        os.kill(os.getpid(), 9)
module.slurm = dies
from flows.launch.slurm.launcher import SlurmLauncher
from tests.flows.launch.contract import SLEEPS
from tests.slurm.test_allocation import CLUSTER, in_turn
from tests.slurm.test_launcher import job
import dataclasses
launcher = SlurmLauncher(CLUSTER)
place = Path({os.fspath(what.run_dir)!r})
first = dataclasses.replace(job(place, SLEEPS), run_dir=place, launch_dir=place / "launch" / "attempt-0001",
                            log_dir=place / "logs")
launcher.submit(launcher.render(in_turn(first, "try", SLEEPS)))
"""
    assert subprocess.run([sys.executable, "-c", driver], check=False).returncode == -signal.SIGKILL


def test_jobs_run_in_turn_on_kept_nodes_and_a_spare_one_replaces_a_lost_one(lab: Lab, tmp_path: Path) -> None:
    lab.wait_until_idle()
    launcher, place = SlurmLauncher(CLUSTER), tmp_path / "run"
    some = dataclasses.replace(
        job(tmp_path, SLEEPS), run_dir=place, launch_dir=place / "launch" / "attempt-0001", log_dir=place / "logs"
    )
    trains = in_turn(some, "train", SLEEPS)

    dies_after_sbatch(trains)
    measures = submit(launcher, in_turn(some, "preflight", "print('measured')", all_nodes=True))
    status = end_of(launcher, measures)
    assert (status.state, len(status.hosts)) == ("succeeded", 3), "spare nodes are measured too"
    kept = launcher.allocation(trains)
    assert kept
    assert (kept.name, kept.hosts) == ("allocation-0001", status.hosts), "the dead driver's nodes are used"

    status = end_of(launcher, submit(launcher, fails(in_turn(some, "fails", ""), 1, after=("pid", 0))))
    assert (status.exit_code, status.blamed_hosts) == (17, kept.hosts[1:2])
    assert launcher.allocation(trains) == kept, "a failed job does not cost the nodes"

    handle = submit(launcher, trains)
    runs(launcher, handle, trains)
    trained = launcher.status(handle).hosts
    assert trained == kept.hosts[:2]
    other = lab.command("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true").stdout
    lab.cut(trained[1])
    status = end_of(SlurmLauncher(CLUSTER), handle)
    assert (status.verdict, status.blamed_hosts) == ("node_failed", (trained[1],))
    wait_for(lambda: lab.state_of(trained[1]).startswith("down"))  # the job's end can come first

    again = in_turn(some, "again", SLEEPS)
    handle = submit(launcher, again)
    runs(launcher, handle, again)
    assert launcher.status(handle).hosts == (trained[0], kept.hosts[2])
    lab.boot(trained[1])
    launcher.cancel(handle, grace_s=0)
    assert launcher.status(handle).ended
    assert launcher.allocation(again) is not None, "the nodes are kept"

    excluded = dataclasses.replace(trains, excluded_hosts=(trained[0],))
    assert launcher.allocation(excluded) is None, "one node is left"
    folder = kept_nodes.newest(place / "launch")
    smaller = tmp_path / "smaller"
    launcher.pass_on(place, smaller)
    one = in_turn(dataclasses.replace(again, run_dir=smaller, launch_dir=smaller / "launch" / "a"), "one", "", nodes=1)
    status = end_of(launcher, submit(launcher, one))
    assert (status.state, len(status.hosts)) == ("succeeded", 1), "another run gets them, and uses a part"
    launcher.release(smaller)
    assert folder
    wait_for(lambda: not lab.command("squeue", "-h", f"--name={folder.job_name}").stdout)
    wait_for(lambda: not lab.command("squeue", "-h", f"--jobs={other.strip()}").stdout)


def test_of_two_runs_one_waits_until_the_other_gives_its_nodes_back(lab: Lab, tmp_path: Path) -> None:
    lab.wait_until_idle()
    launcher, wide = SlurmLauncher(CLUSTER), dataclasses.replace(CLUSTER, nodes=3, spare_nodes=0)
    first, second = (
        dataclasses.replace(job(place, SLEEPS), run_dir=place, launch_dir=place / "launch" / "attempt-0001")
        for place in (tmp_path / "first", tmp_path / "second")
    )
    trains = in_turn(first, "train", SLEEPS)
    holds = submit(launcher, trains)
    runs(launcher, holds, trains)
    competing, competes = SlurmLauncher(wide), in_turn(second, "train", SLEEPS, nodes=3)
    waits = submit(competing, competes)
    wait_for(lambda: competing.status(waits).reason in ("Resources", "Priority"))
    launcher.cancel(holds, grace_s=0)
    assert launcher.allocation(trains), "the first run keeps its nodes between its jobs"
    assert competing.status(waits).state == "queued"
    launcher.release(tmp_path / "first")
    runs(competing, waits, competes)
    assert len(competing.status(waits).hosts) == 3
    competing.cancel(waits, grace_s=0)
    competing.release(tmp_path / "second")
