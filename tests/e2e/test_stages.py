"""A run of three stages whose training is killed right after a boundary, compared with one that is left alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conf.training_rules import EXIT_CODES
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Paced
from tests.e2e.driver import Driver, undisturbed_losses

pytestmark = pytest.mark.processes

#: 3 steps of 4 x 128 tokens, 30 of 4 x 128 and 4 of 2 x 256.
STAGES = (
    "[{name:pre,tokens:1536},{name:mid,tokens:15360,set:{optimizer:{lr:1e-3,schedule:linear}}},"
    "{name:long,tokens:2048,set:{train:{seq_len:256,global_batch_size:2},model:{rope_theta:5e5}}}]"
)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(Paced(tmp_path), "staged")
    yield driver
    driver.kill()


def test_a_kill_after_a_boundary_changes_no_loss(
    driver: Driver, tmp_path: Path, train_here: Callable[[RunPaths, int], int]
) -> None:
    cli = driver.cli
    driver.train(f"train.stages={STAGES}", "train.max_steps=null", "cluster.processes_per_node=1", "checkpoint.keep=1")
    driver.until(lambda: any(event["step"] >= 5 for event in driver.events("step")))
    (pid,) = cli.trainer_pids("staged")
    os.kill(pid, signal.SIGKILL)
    output = driver.end()
    assert driver.process is not None
    assert driver.process.returncode == 0, output

    state = read_state(driver.run)
    assert [(a.cause, a.resumed_from_step) for a in state.attempts] == [
        ("stage", 0),
        ("killed", 3),
        ("stage", 3),
        ("finished", 33),
    ]
    assert state.checkpoints == [3, 30, 33, 37], "the last step of each stage is kept, and the newest of the others"

    def train_all(run: RunPaths, attempt: int) -> int:
        while (code := train_here(run, attempt)) == EXIT_CODES["amend"]:
            attempt += 1
        return code

    expected = undisturbed_losses(driver.run, tmp_path, train_all, steps=37)
    assert cli.losses("staged") == expected
    assert "long (3 of 3, steps 34 to 37)" in cli.run("status", "staged").stdout
