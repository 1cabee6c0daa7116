"""A run that is amended on the way, compared with one that is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import compose
from flows import amendments, pretrain
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Call, Cli
from tests.e2e.driver import undisturbed_losses

pytestmark = pytest.mark.processes

_OVERRIDES = (
    "cluster.processes_per_node=1",
    "checkpoint.every_steps=100",
    "model.num_kv_heads=2",
    "optimizer.min_lr_fraction=1",  # so that the rate doesn't depend on the run's length
)


def test_a_run_that_changes_processes_layout_and_length_sees_the_same_batches_and_losses(
    cli: Cli, call: Call, tmp_path: Path, train_here: Callable[[RunPaths, int], int]
) -> None:
    config = compose([*cli.overrides, *_OVERRIDES, "train.max_steps=10", f"runs_dir={cli.runs_dir}"])
    run = pretrain.create(config, argv=[], run_id="amended")
    amendments.amend(run, ["cluster.processes_per_node=2", "parallel.tensor_parallel_size=2"], by="test", at=5)
    result = cli.run("resume", "amended")
    assert result.returncode == 0, result.stderr
    assert read_state(run).status == "finished"

    fsdp = ("parallel.tensor_parallel_size=1", "parallel.data_parallel=fsdp", "train.micro_batch_size=1")
    result = cli.run("resume", "amended", "train.max_steps=15", *fsdp, "--why", "the loss still falls")
    assert result.returncode == 0, result.stderr
    assert "last step: 10 -> 15" in result.stderr

    expected, steps = undisturbed_losses(run, tmp_path, train_here, steps=15), cli.events("amended", "step")
    assert [event["step"] for event in steps] == list(range(1, 16))
    assert [event["batch"] for event in steps] == list(range(1, 16))
    assert [event["loss"] for event in steps] == pytest.approx(list(expected.values()), rel=1e-5)
    state = read_state(run)
    assert [(a.applied_step, a.why) for a in state.amendments] == [(5, ""), (10, "the loss still falls")]
    assert [(a.cause, a.resumed_from_step, a.config_number) for a in state.attempts] == [
        ("amended", 0, 0),
        ("finished", 5, 1),
        ("finished", 10, 2),
    ]
    assert "amendment 2: in force after step 10" in call("logs", "amended").stdout
