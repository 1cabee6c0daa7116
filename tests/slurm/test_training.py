"""A run on a real Slurm recovers from what a cluster does to it. test_evaluation.py has a run without failures."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flows.recovery.node_ledger import Entry, record
from hlatctl.run import files, memory
from hlatctl.run.fold import read_state
from hlatctl.run.paths import nodes_file
from tests.e2e.conftest import LIMIT, Cli, Paced
from tests.e2e.driver import Driver
from tests.slurm.lab import Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

#: More than a test waits for: it ends such a run.
ENDLESS = ("train.tokens=50M", "train.max_steps=90000", "checkpoint.every_steps=10")
#: What a node of the lab has.
SMALL_DRIVER = ("cluster.slurm.driver.cpus=1", "cluster.slurm.driver.memory_gib=1")


@pytest.fixture(scope="module")
def cli(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command on the lab, with one corpus for all runs."""
    cli = Paced(tmp_path_factory.mktemp("slurm"))
    cli.overrides += ["cluster=slurm", "cluster.nodes=2", "cluster.processes_per_node=1", LIMIT]
    return cli


@pytest.fixture
def driver(cli: Cli, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Driver]:
    lab.wait_until_idle()
    driver = Driver(cli, str(request.node.name).replace("_", "-")[:40])
    yield driver
    driver.kill()
    lab.command("scancel", "--user=root")
    wait_for(lambda: not lab.command("squeue", "-h").stdout)


def test_a_run_survives_what_a_cluster_does_to_it(driver: Driver, lab: Lab, cli: Cli) -> None:
    """One run through all failures, because each start of a run costs more than a failure."""
    _reject_a_node_that_slurm_does_not_know(cli)
    driver.train(*ENDLESS, "cluster.slurm.partition=scavenge", *SMALL_DRIVER)
    driver.steps(1)
    lab.command("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    taken = driver.ended(1)
    assert (taken["cause"], taken["blamed_hosts"], taken["decision"]) == ("preempted", [], "restart")
    assert taken["evidence"].endswith("checkpoint written")

    driver.steps(2)
    _cut_without_a_spare(driver, lab)
    driver.steps(3)
    _kill_a_rank_after_the_scheduler_was_away(driver, lab, cli)
    driver.steps(4)
    lab.command("scancel", "--user=root")
    said = driver.end()
    assert "hlatctl did not cancel it, so it stops the run" in said
    assert f"`hlatctl resume {driver.run.run_id}` continues the run" in said
    assert driver.events("run_finished")[-1]["outcome"] == "stopped"
    _kill_a_driver_in_the_queue(driver, lab)
    _drive_from_jobs_that_end(driver, lab, cli)
    assert driver.events("attempt_ended")[4]["cause"] == "stopped"
    cli.losses(driver.run.run_id)  # every repeated step has its first loss


def test_a_cut_node_costs_no_step_that_its_partner_has_in_memory(driver: Driver, lab: Lab, cli: Cli) -> None:
    """There is no checkpoint, and a spare node takes its place. All losses are those of a run without a fault."""
    short = ("train.max_steps=150", "checkpoint.every_steps=500", "eval.enabled=false", "tracking.enabled=false")
    driver.train(*short, "cluster.spare_nodes=1", "checkpoint.memory_every_steps=4")
    driver.until(lambda: bool(driver.events("step")))
    first, second = read_state(driver.run).attempts[-1].hosts
    folder = lab.memory(first) / memory.of_run(driver.run).relative_to(memory.ROOT) / first

    def step_of_partner() -> int:
        steps = [0]
        for path in folder.glob("*-000001-*.json"):
            with suppress(OSError):  # the next step replaces it
                steps.append(files.read_json(path)["step"])
        return max(steps)

    driver.until(lambda: step_of_partner() >= 20)
    copied = step_of_partner()
    lab.cut(second)
    twin = Driver(cli, f"{driver.run.run_id}-twin")  # while Slurm finds out
    twin.train(*short, "cluster.launcher=local", "cluster.nodes=1", "cluster.processes_per_node=2")
    driver.until(lambda: bool(driver.events("recovered")))
    driver.end()
    started = driver.events("train_started")[1]
    assert started["restored_from"] == "partner"
    assert started["resumed_from_step"] >= copied - 4, "the newest one that both had"
    assert driver.events("run_finished")[-1]["outcome"] == "finished"
    assert not (lab.memory(first) / memory.of_run(driver.run).relative_to(memory.ROOT)).exists()
    lab.boot(second)
    twin.end()
    assert cli.losses(driver.run.run_id) == cli.losses(twin.run.run_id)


def _reject_a_node_that_slurm_does_not_know(cli: Cli) -> None:
    """A job that excluded it would be refused by sbatch."""
    entry = Entry(time_unix_s=time.time(), host="n9", kind="preflight_failed", run_id="before", attempt=0)
    cli.runs_dir.mkdir(exist_ok=True)
    record(nodes_file(cli.runs_dir), [entry])


def _cut_without_a_spare(driver: Driver, lab: Lab) -> None:
    hosts = read_state(driver.run).attempts[-1].hosts
    with lab.drained(*set(lab.nodes).difference(hosts)):
        lab.cut(hosts[1])
        cut = driver.ended(2)
        assert (cut["cause"], cut["blamed_hosts"], cut["decision"]) == ("node_failed", hosts[1:], "restart")
        driver.until(lambda: bool(read_state(driver.run).queued))
        lab.boot(hosts[1])
        driver.steps(3)
        assert read_state(driver.run).attempts[-1].hosts == hosts


def _kill_a_rank_after_the_scheduler_was_away(driver: Driver, lab: Lab, cli: Cli) -> None:
    lab.stop_controller()
    driver.until(lambda: bool(driver.events("scheduler_away")))
    before = read_state(driver.run).step
    driver.until(lambda: read_state(driver.run).step > before)
    lab.start_controller()
    driver.until(lambda: bool(driver.events("scheduler_back")))
    assert len(driver.events("attempt_ended")) == 2, "nothing was concluded"
    os.kill(cli.trainer_pids(driver.run.run_id)[1], signal.SIGKILL)
    killed = driver.ended(3)
    assert (killed["cause"], len(killed["hosts"]), len(killed["blamed_hosts"])) == ("killed", 2, 1)
    driver.until(lambda: len(driver.events("recovered")) == 3)
    assert driver.events("recovered")[2]["warm"], "nothing was imported again"


def _kill_a_driver_in_the_queue(driver: Driver, lab: Lab) -> None:
    held = lab.command("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    driver.resume()
    driver.until(lambda: bool(read_state(driver.run).queued))
    driver.kill()
    lab.command("scancel", held.stdout.strip())


def _drive_from_jobs_that_end(driver: Driver, lab: Lab, cli: Cli) -> None:
    run_id, name = driver.run.run_id, f"hlatctl:{driver.run.root}/driver"
    started = len(driver.events("head_started"))
    submitted = cli.run("resume", run_id, "--driver", "slurm")
    assert (submitted.returncode, submitted.stdout) == (0, f"{run_id}\n"), submitted.stderr
    assert "the run's driver is Slurm job " in submitted.stderr

    def jobs(state: str) -> list[str]:
        return lab.command("squeue", "-h", "-t", state, "-n", name, "-o", "%i").stdout.split()

    wait_for(lambda: any(event["attempt"] == 5 for event in driver.events("checkpoint_committed")))
    (first,), (second,) = jobs("RUNNING"), jobs("PENDING")
    status = cli.run("status", run_id).stdout
    assert re.search(rf"Slurm job {first} runs on n\d, time left .*; job {second} follows it", status), status
    lab.command("scancel", "--signal=USR1", "--batch", first)  # as Slurm does before the time limit
    wait_for(lambda: len(driver.events("attempt_attached")) == 1)
    assert jobs("RUNNING") == [second]
    lab.command("scancel", "--signal=KILL", "--full", second)
    wait_for(lambda: len(driver.events("attempt_attached")) == 2)
    assert len(driver.events("head_started")) == started + 3
    assert len(driver.events("attempt_started")) == 5, "training goes on meanwhile"
    assert cli.run("stop", run_id).returncode == 0
    wait_for(lambda: not jobs("PENDING,RUNNING,COMPLETING"))
