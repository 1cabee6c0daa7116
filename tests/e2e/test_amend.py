"""Runs that are amended on the way, compared with one that is left alone."""

from __future__ import annotations

import pytest

from conf.compose import compose
from flows import amendments, pretrain
from hlatctl.run.fold import read_state
from tests.e2e.conftest import Cli

pytestmark = pytest.mark.processes

_STEPS = ("train.max_steps=18", "checkpoint.every_steps=100", "model.num_kv_heads=2")


@pytest.fixture(scope="module")
def undisturbed(cli: Cli) -> list[float]:
    """The losses of a run on one process."""
    result = cli.train("undisturbed", *_STEPS, "cluster.processes_per_node=1")
    assert result.returncode == 0, result.stderr
    return [event["loss"] for event in cli.events("undisturbed", "step")]


def test_a_run_that_changes_its_processes_and_layout_sees_the_same_batches_and_losses(
    cli: Cli, undisturbed: list[float]
) -> None:
    config = compose([*cli.overrides, *_STEPS, "cluster.processes_per_node=1", f"runs_dir={cli.runs_dir}"])
    run = pretrain.create(config, argv=[], run_id="elastic")
    for at, overrides in (
        (6, ("cluster.processes_per_node=2", "parallel.tensor_parallel_size=2")),
        (12, ("parallel.tensor_parallel_size=1", "parallel.data_parallel=fsdp", "train.micro_batch_size=1")),
    ):
        amendments.amend(run, overrides, by="test", at=at)
    result = cli.run("resume", "elastic")
    assert result.returncode == 0, result.stderr
    steps = cli.events("elastic", "step")
    assert [event["step"] for event in steps] == list(range(1, 19))
    assert [event["batch"] for event in steps] == list(range(1, 19))
    assert [event["loss"] for event in steps] == pytest.approx(undisturbed, rel=1e-5)
    state = read_state(run)
    assert [a.applied_step for a in state.amendments] == [6, 12]
    assert [(a.cause, a.resumed_from_step, a.config_number) for a in state.attempts] == [
        ("amended", 0, 0),
        ("amended", 6, 1),
        ("finished", 12, 2),
    ]


def test_resume_with_keys_amends_a_finished_run_and_trains_on(cli: Cli, undisturbed: list[float]) -> None:
    result = cli.run("resume", "undisturbed", "train.max_steps=21", "optimizer.lr=1e-4", "--why", "it still falls")
    assert result.returncode == 0, result.stderr
    assert "last step: 18 -> 21" in result.stderr
    assert [event["step"] for event in cli.events("undisturbed", "step")] == list(range(1, 22))
    (event,) = cli.events("undisturbed", "config_amended")
    assert (event["changes"]["optimizer.lr"][1], event["why"]) == (1e-4, "it still falls")
    said = cli.run("logs", "undisturbed").stdout
    assert "amendment 1: in force after step 18" in said
