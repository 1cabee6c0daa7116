"""The three stages of an experiment, whose training is killed twice at a boundary, and an undisturbed twin."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.training_rules import EXIT_CODES
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Paced
from tests.e2e.driver import Driver, undisturbed_losses

pytestmark = pytest.mark.processes

_EXPERIMENT = "olmo3_like"
#: Steps of each stage of the experiment, whose tokens would take minutes.
_STEPS = (3, 22, 2)


def _shortened(experiment: str) -> str:
    """Return the override that gives the stages of an experiment :data:`_STEPS` steps and changes nothing else."""
    config = compose([f"experiment={experiment}"])
    tokens = [steps * stage.config.tokens_per_step for stage, steps in zip(config.stages, _STEPS, strict=True)]
    stages = [
        {"name": stage.name, "tokens": number, "set": stage.set}
        for stage, number in zip(config.train.stages, tokens, strict=True)
    ]
    return f"train.stages={_in_hydra(stages)}"


def _in_hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_hydra(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(_in_hydra, value)) + "]" if isinstance(value, list) else str(value)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(Paced(tmp_path), "staged")
    yield driver
    driver.kill()


def test_kills_after_a_boundary_and_in_its_first_step_change_no_loss(
    driver: Driver, tmp_path: Path, train_here: Callable[[RunPaths, int], int]
) -> None:
    cli = driver.cli
    own = compose([f"experiment={_EXPERIMENT}"]).train
    driver.train(
        f"experiment={_EXPERIMENT}",
        _shortened(_EXPERIMENT),
        f"train.seq_len={own.seq_len}",
        f"train.global_batch_size={own.global_batch_size}",
        "train.max_steps=null",
        "cluster.processes_per_node=1",
        "checkpoint.keep=1",
    )
    driver.until(lambda: any(event["step"] >= 5 for event in driver.events("step")))
    (pid,) = cli.trainer_pids("staged")
    os.kill(pid, signal.SIGKILL)
    driver.until(lambda: any(event["attempt"] == 3 for event in driver.events("train_started")))
    (pid,) = cli.trainer_pids("staged")
    os.kill(pid, signal.SIGKILL)
    output = driver.end()
    assert driver.process is not None
    assert driver.process.returncode == 0, output

    state = read_state(driver.run)
    assert [(a.cause, a.resumed_from_step) for a in state.attempts] == [
        ("stage", 0),
        ("killed", 3),
        ("killed", 3),
        ("stage", 3),
        ("finished", 25),
    ]
    assert state.checkpoints == [3, 20, 25, 27], "the last step of each stage is kept, and the newest of the others"

    def train_all(run: RunPaths, attempt: int) -> int:
        while (code := train_here(run, attempt)) == EXIT_CODES["amend"]:
            attempt += 1
        return code

    expected = undisturbed_losses(driver.run, tmp_path, train_all, steps=27)
    assert cli.losses("staged") == expected
    assert "long_context (3 of 3, steps 26 to 27)" in cli.run("status", "staged").stdout
