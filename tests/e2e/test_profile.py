"""A running job: where it listens, and how it is profiled through the command line, without a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flows.launch.base import Handle
from flows.launch.local import recorded_start
from hlatctl.run import processes
from hlatctl.run.fold import read_state
from hlatctl.run.paths import table_name, trace_name
from tests.e2e.conftest import Cli, Paced
from tests.sockets import IPV4_LOOPBACK, hosts, listening
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Paced(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def driver(cli: Cli) -> Iterator[subprocess.Popen[str]]:
    driver = cli.start_train("profiled", "train.max_steps=1000000", "train.tokens=1T", "checkpoint.every_steps=100000")
    try:
        wait_for(lambda: driver.poll() is not None or cli.events("profiled", "step"))
        yield driver
    finally:
        if driver.returncode is None:
            cli.run("stop", "profiled")
            driver.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_listens_on_loopback_only(cli: Cli, driver: subprocess.Popen[str]) -> None:
    handle = Handle(launcher="local", name="train", launch_dir=os.fspath(cli.paths("profiled").launch(1)))
    job = recorded_start(handle)
    assert job
    pids = [driver.pid, *processes.descendants(driver.pid), *(process.pid for process in job.members())]
    assert hosts(listening(pids)) == {IPV4_LOOPBACK}


def test_a_running_job_is_profiled_without_a_restart(cli: Cli, driver: subprocess.Popen[str]) -> None:
    made = cli.run("profile", "profiled", "--steps", "2", "--ranks", "all", "--no-memory")
    assert made.returncode == 0, made.stderr
    assert "ProfilerStep*" in made.stdout
    assert "profile 1: asked training for 2 steps of 2 ranks" in made.stderr
    refused = cli.run("profile", "profiled", "--ranks", "7")
    assert "the run has ranks 0 to 1" in refused.stderr
    assert cli.run("stop", "profiled").returncode == 0
    driver.communicate()
    run = cli.paths("profiled")
    names = {name(rank) for name in (trace_name, table_name) for rank in (0, 1)}
    assert {path.name for path in run.profile(1).iterdir()} == names
    state = read_state(run)
    assert [(attempt.cause, attempt.resumed_from_step) for attempt in state.attempts] == [("stopped", 0)]
    assert f"profile 1    steps {state.profiles[0].first_step:,} to" in cli.run("status", "profiled").stdout
    refused = cli.run("profile", "profiled")
    assert "no driver is running" in refused.stderr
