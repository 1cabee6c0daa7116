"""A run with the real torchtitan through the command line: killed, stopped, amended, proven and forked."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.e2e.driver import Driver

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed (docs/engines.md)"),
]
_LONG = ("backend=torchtitan", "parallel=fsdp", "train.max_steps=4000", "checkpoint.every_steps=5")


def test_a_run_survives_a_killed_rank_and_is_stopped_amended_proven_and_forked(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    driver = Driver(cli, "titan")
    driver.train(*_LONG)
    try:
        driver.steps(1)
        os.kill(cli.trainer_pids("titan")[0], signal.SIGKILL)
        assert driver.ended(1)["cause"] == "killed"
        driver.steps(2)
        assert cli.run("stop", "titan").returncode == 0
        driver.end()
        last = driver.events("train_stopped")[-1]["step"]
        changes = (f"train.max_steps={last + 10}", "optimizer.weight_decay=0", "optimizer.lr=1e-3")
        assert cli.run("amend", "titan", *changes).returncode == 0
        assert cli.run("resume", "titan").returncode == 0
    finally:
        driver.kill()
    steps = {event["step"]: event for event in driver.events("step")}
    assert list(steps) == list(range(1, last + 11))
    assert steps[last]["lr"] > 0

    proof = cli.run("verify-resume", "titan")
    assert proof.returncode == 0, proof.stderr
    assert "equal, to the last bit" in proof.stdout
    fork = cli.run("fork", "titan", "--run-id", "native", "backend=torch_native", f"train.max_steps={last + 12}")
    assert fork.returncode == 0, fork.stderr
    began = Driver(cli, "native").events("step")[0]
    assert began["loss"] == pytest.approx(steps[last + 10]["loss"], rel=0.2)
