"""A sweep on Slurm: its trials submit their jobs without waiting for each other."""

from __future__ import annotations

from pathlib import Path

from hlatctl.run.journal import read_events
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import fold
from tests.e2e.conftest import Cli, wait_for
from tests.slurm.held import held, release
from tests.slurm.lab import Lab

SWEEP, FIRST = "four", "four-t0000"
ON_ONE_NODE = ("cluster=slurm", "cluster.nodes=1", "cluster.processes_per_node=1", "cluster.slurm.extra=[--hold]")


def test_four_trials_wait_in_the_queue_at_once_and_finish(lab: Lab, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    axis = ("optimizer.beta2=0.9,0.95,0.97,0.99", "sweep.parallel=4", "train.max_steps=4")
    sweep = cli.start("sweep", "--yes", "--sweep-id", SWEEP, *cli.overrides, *ON_ONE_NODE, *axis)
    try:
        wait_for(lambda: release(lab, f"/{FIRST}/") or _has_data(cli) or sweep.poll() is not None)
        wait_for(lambda: len(held(lab)) == 4 or sweep.poll() is not None)
        waiting = sorted(name.split("/")[-4] for _, _, name in held(lab))
        assert waiting == [f"{SWEEP}-t000{number}" for number in range(4)]
        wait_for(lambda: release(lab) or sweep.poll() is not None)
        output, _ = sweep.communicate()
    finally:
        sweep.kill()
    assert sweep.returncode == 0, output
    state = fold(read_events(SweepPaths(cli.runs_dir / SWEEP)))
    assert (state.status, state.count("finished")) == ("finished", 4)


def _has_data(cli: Cli) -> bool:
    """Whether the first trial has prepared the corpus for all."""
    return any(event["stage"] == "data" for event in cli.events(FIRST, "stage_finished"))
