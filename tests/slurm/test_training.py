"""Whole runs on a real Slurm: equal to the local launcher, and recovered from what a cluster does to them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from flows.launch.slurm import script
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Cli, wait_for
from tests.slurm.lab import Lab

pytestmark = pytest.mark.processes

STEPS = 20
#: More than a test waits for: it ends such a run.
ENDLESS = ("train.tokens=50M", "train.max_steps=90000", "checkpoint.every_steps=20")


@pytest.fixture(scope="module")
def cli(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command on the lab, with one corpus for all runs."""
    cli = Cli(tmp_path_factory.mktemp("slurm"))
    cli.overrides += ["cluster=slurm", "cluster.nodes=2", "cluster.processes_per_node=1", f"train.max_steps={STEPS}"]
    return cli


class Driver:
    """A driver of a run, which the test may end; and the run."""

    def __init__(self, cli: Cli, run_id: str) -> None:
        self._cli, self.run = cli, RunPaths(cli.runs_dir / run_id)
        self.process: subprocess.Popen[str] | None = None

    def train(self, *overrides: str) -> None:
        self.process = self._cli.start_train(self.run.run_id, *ENDLESS, *overrides)

    def resume(self) -> None:
        self.process = self._cli.start("resume", self.run.run_id)

    def kill(self) -> None:
        if not self._over() and self.process:
            self.process.kill()
            self.process.communicate()

    def end(self) -> str:
        """Wait for the driver's end; return what it printed."""
        assert self.process
        return self.process.communicate()[0]

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.run) if event["kind"] == kind]

    def steps(self, attempt: int) -> None:
        """Wait until an attempt has written a checkpoint."""
        self.until(lambda: any(event["attempt"] == attempt for event in self.events("checkpoint_committed")))

    def ended(self, attempt: int) -> Event:
        """Wait until an attempt has ended."""
        self.until(lambda: len(self.events("attempt_ended")) >= attempt)
        return self.events("attempt_ended")[attempt - 1]

    def until(self, true: object) -> None:
        """Wait until a condition holds, as long as the driver runs."""
        wait_for(lambda: true() or self._over())  # type: ignore[operator]
        assert true(), self.end()  # type: ignore[operator]

    def job(self, attempt: int) -> str:
        """The name of an attempt's job in Slurm."""
        return script.job_name(os.fspath(self.run.launch(attempt)), "train")

    def _over(self) -> bool:
        return self.process is None or self.process.poll() is not None


@pytest.fixture
def driver(cli: Cli, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Driver]:
    wait_for(lambda: all(lab.state_of(node) == "idle" for node in lab.nodes))
    driver = Driver(cli, str(request.node.name).replace("_", "-")[:40])
    yield driver
    driver.kill()
    lab.command("scancel", "--user=root")
    wait_for(lambda: not lab.command("squeue", "-h").stdout)


def losses(run: RunPaths) -> dict[int, float]:
    return {step: event["loss"] for step, event in read_state(run).steps.items()}


def test_two_nodes_train_to_the_end_with_the_losses_of_one_machine(cli: Cli, driver: Driver) -> None:
    assert cli.train("nodes").returncode == 0
    local = cli.train("local", "cluster=local", "cluster.nodes=1", "cluster.processes_per_node=2")
    assert local.returncode == 0, local.stdout + local.stderr
    here, there = (losses(RunPaths(cli.runs_dir / name)) for name in ("local", "nodes"))
    assert len(here) == STEPS
    assert here == there


def test_a_killed_rank_a_preemption_and_a_power_cut_restart_the_run(driver: Driver, lab: Lab, cli: Cli) -> None:
    driver.train("cluster.slurm.partition=scavenge")
    driver.steps(1)
    os.kill(cli.trainer_pids(driver.run.run_id)[1], signal.SIGKILL)
    first = driver.ended(1)
    assert (first["cause"], len(first["hosts"]), len(first["blamed_hosts"])) == ("killed", 2, 1)

    driver.steps(2)
    lab.command("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    second = driver.ended(2)
    assert (second["cause"], second["blamed_hosts"], second["decision"]) == ("preempted", [], "restart")
    assert second["evidence"].endswith("checkpoint written")

    driver.steps(3)
    cut = read_state(driver.run).attempts[-1].hosts[1]
    lab.cut(cut)
    third = driver.ended(3)
    assert (third["cause"], third["blamed_hosts"], third["decision"]) == ("node_failed", [cut], "restart")
    driver.steps(4)
    assert cut not in read_state(driver.run).attempts[-1].hosts
    lab.boot(cut)
    assert "restart" in third["why"]


def test_a_cancelled_job_stops_the_run_and_drivers_may_die_in_the_queue(driver: Driver, lab: Lab, cli: Cli) -> None:
    driver.train()
    driver.steps(1)
    lab.command("scancel", f"--name={driver.job(1)}")
    said = driver.end()
    assert "hlatctl did not cancel it, so it stops the run" in said
    assert f"`hlatctl resume {driver.run.run_id}` continues the run" in said
    assert driver.events("run_finished")[-1]["outcome"] == "stopped"

    held = lab.command("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    driver.resume()
    driver.until(lambda: bool(read_state(driver.run).queued))
    driver.kill()
    lab.command("scancel", held.stdout.strip())
    driver.resume()
    driver.steps(2)
    driver.kill()
    driver.resume()
    driver.until(lambda: bool(driver.events("attempt_attached")))
    assert len(lab.command("squeue", "-h", "-t", "all", f"--name={driver.job(2)}").stdout.splitlines()) == 1
    assert cli.run("stop", driver.run.run_id).returncode == 0
    driver.end()
    assert driver.ended(2)["cause"] == "stopped"
