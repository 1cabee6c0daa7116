"""A whole run on two nodes of a cluster that fails in several ways, and repeats lost steps exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlatctl.run import files
from hlatctl.run.fold import read_state
from tests.e2e.conftest import LIMIT, Cli
from tests.e2e.driver import Driver, Held
from tests.kubernetes.lab import Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

RUN, STEPS, LAST_TOKENS = "whole", 300, 153_600
SMALL = (f"train.max_steps={STEPS}", "train.global_batch_size=4", "checkpoint.every_steps=20")
EVAL = ("eval.enabled=true", "eval.validation_tokens=1024", "eval.tasks=[validation]")
#: `hlatctl` with a launcher that dies as soon as the server has created the first training job.
DIES = """
import os, signal, sys
from flows.launch.kubernetes.api import Api
from hlatctl.__main__ import main
create = Api.create
def dies(self, text):
    create(self, text)
    if "/attempt-0001/train" in text:
        os.kill(os.getpid(), signal.SIGKILL)
Api.create = dies
sys.exit(main())
"""


@pytest.fixture
def cli(lab: Lab, tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def driver(cli: Cli, lab: Lab) -> Iterator[Driver]:
    driver = Driver(cli, RUN)
    yield driver
    driver.kill()
    for held in cli.trainer_pids(RUN):
        os.kill(held, signal.SIGKILL)
    lab.clear()


def on_the_cluster(cli: Cli) -> tuple[str, ...]:
    kubernetes = {"image": "none", "python": sys.executable, "grace_s": 5, "lost_after_s": 1}
    settings = (f"cluster.kubernetes.{key}={value}" for key, value in kubernetes.items())
    claim = f"+cluster.kubernetes.claims.shared={cli.folder}"
    return ("cluster=kubernetes", "cluster.nodes=2", "cluster.processes_per_node=1", LIMIT, claim, *settings)


def test_a_run_survives_a_killed_driver_an_absent_server_and_a_lost_node(driver: Driver, lab: Lab, cli: Cli) -> None:
    """One run through all failures, because each start of a run costs more than a failure."""
    words = ("train", "--run-id", RUN, *cli.overrides, *SMALL, *EVAL, *on_the_cluster(cli))
    died = subprocess.run((sys.executable, "-c", DIES, *words), env=cli.env, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    training = Held(cli, RUN)

    driver.resume()
    driver.until(lambda: bool(read_state(driver.run).attempts[-1].hosts))
    jobs = wait_for(lambda: lab.kubectl("get", "jobs", "--output=name", f"--selector=hlatctl/run={RUN}").split())
    assert len([name for name in jobs if "train" in name]) == 1, jobs
    assert len(driver.events("attempt_started")) == len(driver.events("attempt_attached")) == 1
    _train_without_a_server(driver, lab, training)

    hosts = read_state(driver.run).attempts[-1].hosts
    lab.nodes.cut(hosts[1])
    lost = driver.ended(1)
    assert (lost["cause"], lost["blamed_hosts"], lost["decision"]) == ("node_failed", hosts[1:], "restart")
    assert driver.end().count("attempt 2: finished") == 1
    assert driver.events("run_finished")[-1]["outcome"] == "finished"
    assert set(hosts[1:]).isdisjoint(driver.events("attempt_ended")[1]["hosts"])
    _check_numbers(cli)


def _train_without_a_server(driver: Driver, lab: Lab, training: Held) -> None:
    """Hold training, so that it can't end before the driver notices."""
    lab.server.stop_server()
    try:
        driver.until(lambda: bool(driver.events("scheduler_away")))
        training.release()
        driver.steps(1)
        training.hold()
    finally:
        lab.server.start_server()
    driver.until(lambda: bool(driver.events("scheduler_back")))
    assert not driver.events("attempt_ended"), "nothing was concluded"
    assert read_state(driver.run).step < STEPS


def _check_numbers(cli: Cli) -> None:
    """Every step since the restored checkpoint is repeated with its first loss, which ``losses`` compares."""
    assert list(cli.losses(RUN)) == list(range(1, STEPS + 1))
    lost, repeating = read_state(cli.paths(RUN)).attempts
    steps = [[e["step"] for e in cli.events(RUN, "step") if e["attempt"] == number] for number in (1, 2)]
    assert repeating.resumed_from_step is not None
    assert set(steps[0]) & set(steps[1]) == set(range(repeating.resumed_from_step + 1, lost.last_step + 1))
    scores = files.read_sealed_json(cli.paths(RUN).eval(LAST_TOKENS) / "results.json")["scores"]
    assert "validation_loss" in scores
