"""Stopping and interrupting a run, and ending its driver, change no loss. test_drill.py has the faults."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hlatctl.run.errors import DataError, StoppedError
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Cli, Paced
from tests.e2e.driver import undisturbed_losses
from tests.flows.tracking.notify.conftest import TOKEN, Hook, hook
from tests.waiting import wait_for

__all__ = ["hook"]

pytestmark = pytest.mark.processes

#: More steps than a test waits for, with rates that don't depend on their number.
ENDLESS = ("train.max_steps=90000", "train.tokens=1T", "optimizer.min_lr_fraction=1", "cluster.processes_per_node=1")


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Paced(tmp_path)
    yield cli
    if cli.trainer_pids("stopped"):  # the test has failed
        cli.run("stop", "stopped")


def wait_for_new_checkpoints(cli: Cli, run_id: str, count: int) -> None:
    already = len(cli.events(run_id, "checkpoint_committed"))
    wait_for(lambda: len(cli.events(run_id, "checkpoint_committed")) >= already + count)


def assert_stopped_with_a_checkpoint(cli: Cli, run_id: str, driver: subprocess.Popen[str]) -> None:
    output, _ = driver.communicate()
    assert driver.returncode == StoppedError.exit_code, output
    assert f"hlatctl resume {run_id}" in output
    assert f"stopped: run {run_id}: stopped on request after writing a checkpoint\n" in output
    assert "error:" not in output
    assert "Traceback" not in output
    stopped = cli.events(run_id, "train_stopped")[-1]
    assert stopped["reason"] == "stop"
    assert cli.events(run_id, "checkpoint_written")[-1]["step"] == stopped["step"]
    assert not cli.trainer_pids(run_id)
    assert "stopped" in cli.run("status", run_id).stdout


def assert_told_once_and_nothing_holds_the_address(cli: Cli, run_id: str, hook: Hook) -> None:
    told = [title.removeprefix(f"{run_id}: ").partition(" at ")[0] for title in hook.titles]
    assert told == ["stopped", "stopped", "failed", "finished"]
    assert f"Command: hlatctl resume {run_id}" in hook.messages[2]["message"]
    for path in cli.paths(run_id).root.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), f"{path} has the address of the service"


def test_ending_the_driver_a_stop_and_an_interrupt_lose_nothing(
    cli: Cli, hook: Hook, tmp_path: Path, train_here: Callable[[RunPaths, int], int]
) -> None:
    driver = cli.start_train("stopped", *ENDLESS, "notify.urls=[env:HOOK_URL]", "notify.on=[stopped,failed,finished]")
    wait_for_new_checkpoints(cli, "stopped", 1)
    driver.terminate()
    output, _ = driver.communicate()
    assert driver.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), output
    assert "Traceback" not in output
    assert cli.trainer_pids("stopped"), "training continues"
    assert cli.run("stop", "stopped").returncode == 0
    assert not cli.trainer_pids("stopped")

    driver = cli.start("resume", "stopped")
    wait_for_new_checkpoints(cli, "stopped", 1)
    assert cli.run("stop", "stopped").returncode == 0
    assert_stopped_with_a_checkpoint(cli, "stopped", driver)

    driver = cli.start("resume", "stopped")
    wait_for_new_checkpoints(cli, "stopped", 1)
    driver.send_signal(signal.SIGINT)
    assert_stopped_with_a_checkpoint(cli, "stopped", driver)

    corpus = cli.folder / "corpus"
    away = corpus.rename(cli.folder / "corpus-away")
    assert cli.run("resume", "stopped").returncode == DataError.exit_code
    away.rename(corpus)

    last = cli.events("stopped", "step")[-1]["step"] + 5
    result = cli.run("resume", "stopped", f"train.max_steps={last}")
    assert result.returncode == 0, result.stderr
    assert cli.losses("stopped") == undisturbed_losses(cli.paths("stopped"), tmp_path, train_here, steps=last)
    assert_told_once_and_nothing_holds_the_address(cli, "stopped", hook)
