"""What a person may do to a run: stop it, interrupt it, end its head. No bit changes. Faults are in test_drill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from flows.launch.base import Handle
from flows.launch.records import started
from hlatctl.run import processes
from hlatctl.run.errors import StoppedError
from tests.e2e.conftest import Cli, wait_for
from tests.sockets import IPV4_LOOPBACK, hosts, listening

#: Enough steps that something can be done to a run while it trains.
LONG = "train.max_steps=800"


@pytest.fixture(scope="module")
def losses(cli: Cli) -> dict[int, float]:
    """The losses of a run of that length that nothing disturbs."""
    result = cli.train("long", LONG)
    assert result.returncode == 0, result.stderr
    return cli.losses("long")


def wait_for_new_checkpoints(cli: Cli, run_id: str, count: int) -> None:
    already = len(cli.events(run_id, "checkpoint_committed"))
    wait_for(lambda: len(cli.events(run_id, "checkpoint_committed")) >= already + count)


def pids_of(cli: Cli, run_id: str, head: subprocess.Popen[str]) -> list[int]:
    """The driver, all that it has started, and all of the training job."""
    handle = Handle(launcher="local", name="train", launch_dir=os.fspath(cli.paths(run_id).launch(1)))
    job = started(handle)
    assert job
    return [head.pid, *processes.descendants(head.pid), *(process.pid for process in job.members())]


def assert_stopped_with_a_checkpoint(cli: Cli, run_id: str, head: subprocess.Popen[str]) -> None:
    output, _ = head.communicate(timeout=60)
    assert head.returncode == StoppedError.exit_code, output
    assert f"hlatctl resume {run_id}" in output
    assert f"stopped: run {run_id}: stopped on request after writing a checkpoint\n" in output
    assert "error:" not in output
    assert "Traceback" not in output
    stopped = cli.events(run_id, "train_stopped")[-1]
    assert stopped["reason"] == "stop"
    assert cli.events(run_id, "checkpoint_written")[-1]["step"] == stopped["step"]
    assert not cli.trainer_pids(run_id)
    assert "stopped" in cli.run("status", run_id).stdout


def test_a_head_told_to_end_a_stop_and_an_interrupt_lose_nothing(cli: Cli, losses: dict[int, float]) -> None:
    head = cli.start_train("stopped", LONG)
    wait_for_new_checkpoints(cli, "stopped", 1)
    if sys.platform == "linux":
        assert hosts(listening(pids_of(cli, "stopped", head))) == {IPV4_LOOPBACK}, "a real run, seen from its machine"
    head.terminate()
    output, _ = head.communicate(timeout=60)
    assert head.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), output
    assert "Traceback" not in output
    assert cli.trainer_pids("stopped"), "training goes on"
    assert cli.run("stop", "stopped").returncode == 0
    assert not cli.trainer_pids("stopped")

    head = cli.start("resume", "stopped")
    wait_for_new_checkpoints(cli, "stopped", 1)
    assert cli.run("stop", "stopped").returncode == 0
    assert_stopped_with_a_checkpoint(cli, "stopped", head)

    head = cli.start("resume", "stopped")
    wait_for_new_checkpoints(cli, "stopped", 1)
    head.send_signal(signal.SIGINT)
    assert_stopped_with_a_checkpoint(cli, "stopped", head)

    result = cli.run("resume", "stopped")
    assert result.returncode == 0, result.stderr
    assert cli.losses("stopped") == losses
