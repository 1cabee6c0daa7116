"""Preflight on two nodes of a real Slurm: each reports its software."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from flows import pretrain
from flows.launch.base import Status
from flows.launch.slurm.launcher import SlurmLauncher
from flows.runtime.context import make_job
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from tests.slurm.lab import Lab, wait_for

pytestmark = pytest.mark.processes

SETTINGS = [
    "cluster=slurm",
    "eval.enabled=false",
    "backend.compile=false",
    "preflight.min_open_files=1",
    "preflight.min_matmul_gflops_per_s=0.001",
    "preflight.min_allreduce_mib_per_s=0.001",
]


def measured(run: RunPaths) -> Status:
    """Run the job; return how it ended."""
    config = compose([*SETTINGS, f"runs_dir={run.root.parent}"])
    launcher = SlurmLauncher(config.cluster)
    argv = ("-m", "trainer.preflight", "--run-dir", str(run.root))
    handle = launcher.submit(launcher.render(make_job(config, run, "preflight", *argv, distributed=True)))
    wait_for(lambda: launcher.status(handle).ended)
    return launcher.status(handle)


def test_two_nodes_report_their_software_and_share_the_run_directory(lab: Lab, tmp_path: Path) -> None:
    wait_for(lambda: all(lab.state_of(node) == "idle" for node in lab.nodes))
    run = pretrain.create(compose([*SETTINGS, f"runs_dir={tmp_path}"]), argv=[])
    status = measured(run)
    workers = files.read_json(run.preflight)["workers"]
    assert (status.state, [worker["host"] for worker in workers]) == ("succeeded", list(status.hosts))
    assert len({tuple(worker["versions"].items()) for worker in workers}) == 1
    assert {"hlatctl", "torch", "python"} == set(workers[0]["versions"])
    assert list(run.preflight_nodes.iterdir()) == [], "the tokens are removed"
