"""A sweep on Slurm: its trials submit their jobs without waiting for each other, and survive the sweep's drivers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hlatctl.run.journal import read_events
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import SweepState, fold
from tests.e2e.conftest import Cli
from tests.slurm.lab import Lab, held, release
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

SWEEP = "two"
TRIALS = [f"{SWEEP}-t000{number}" for number in range(2)]
FIRST = TRIALS[0]
ON_ONE_NODE = ("cluster=slurm", "cluster.nodes=1", "cluster.processes_per_node=1", "cluster.slurm.extra=['--hold']")
SMALL_DRIVER = ("cluster.slurm.driver.cpus=1", "cluster.slurm.driver.memory_gib=1")


def test_trials_do_not_wait_for_the_first_in_the_queue_and_a_killed_driver_costs_no_second_job(
    lab: Lab, tmp_path: Path
) -> None:
    cli = Cli(tmp_path)

    def state() -> SweepState:
        return fold(read_events(SweepPaths(cli.runs_dir / SWEEP)))

    axis = ("optimizer.beta2=0.9,0.95", "sweep.parallel=2", "train.max_steps=4")

    def jobs(states: str) -> list[str]:
        name = f"hlatctl:{cli.runs_dir / SWEEP}/driver"
        return lab.command("squeue", "-h", "-t", states, "-n", name, "-o", "%i").stdout.split()

    driver = cli.start("sweep", "--yes", "--sweep-id", SWEEP, *cli.overrides, *ON_ONE_NODE, *SMALL_DRIVER, *axis)
    try:
        wait_for(lambda: len(held(lab)) == 2 or driver.poll() is not None)
        assert all(any(job.of(trial) for job in held(lab)) for trial in TRIALS)
        driver.kill()
        driver.communicate()
        driver = cli.start("resume", SWEEP)
        wait_for(lambda: release(lab, but=FIRST) or state().count("finished") == 1 or driver.poll() is not None)
        assert state().trials[0].status == "running", "it still waits in the queue"
        assert any(job.of(FIRST) for job in held(lab))
        driver.terminate()
        driver.communicate()
        submitted = cli.run("resume", SWEEP, "--driver", "slurm")
        assert submitted.returncode == 0, submitted.stderr
        wait_for(lambda: release(lab) or not jobs("PENDING,RUNNING,COMPLETING"))
    finally:
        driver.kill()
        lab.command("scancel", *jobs("PENDING,RUNNING"))
    assert (state().status, state().count("finished")) == ("finished", 2)
    known = lab.command("squeue", "-h", "-t", "all", "-o", "%j").stdout.split()
    names = [name for name in known if str(cli.runs_dir) in name and not name.endswith("/driver")]
    assert names
    assert [name for name, jobs in Counter(names).items() if jobs > 1] == [], "a second job"
    assert len(list(cli.runs_dir.glob("*/launch/attempt-0000/data.sh"))) == 1, "one trial prepares the corpus for all"
    assert {len(cli.events(trial, "attempt_started")) for trial in TRIALS} == {1}
