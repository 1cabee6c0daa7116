"""Overhead of the flow: ``hlatctl train`` against a bare ``torchrun -m trainer`` of the same configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conf.compose import compose
from flows import pretrain
from flows.launch.base import Job
from flows.launch.local import LocalLauncher
from flows.stages.attempt import training_job
from hlatctl.run import files
from hlatctl.run.runs import list_runs

_STEPS = 60
_GOAL_S = 15.0


def run() -> None:
    """Print both wall times, their difference and their ratio."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        overrides = [
            f"runs_dir={folder}",
            f"train.max_steps={_STEPS}",
            "eval.enabled=false",
            f"cluster.worker_cache_dir={folder}/worker",
        ]
        _hlatctl_train(overrides)  # prepares corpus and graphs, so that neither side's time includes that
        flow_s = _hlatctl_train(overrides)
        bare_s = _bare_trainer(overrides, list_runs(Path(folder))[-1].dataset)
    print(f"hlatctl train         {flow_s:.1f} s ({_STEPS} steps)")
    print(f"torchrun -m trainer   {bare_s:.1f} s")
    print(f"overhead              {flow_s - bare_s:.1f} s (goal {_GOAL_S:g} s), ratio {flow_s / bare_s:.2f}")


def _hlatctl_train(overrides: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "hlatctl", "train", *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def _bare_trainer(overrides: list[str], dataset: Path) -> float:
    config = compose(overrides)
    run = pretrain.create(config, argv=[])
    files.write_json(run.dataset, files.read_json(dataset))
    job: Job = training_job(config, run, 1)
    plan = LocalLauncher().render(job)
    files.write_text(plan.script_path, plan.script)
    job.log_dir.mkdir(parents=True)
    start = time.perf_counter()
    subprocess.run(["/bin/sh", os.fspath(plan.script_path)], check=True, capture_output=True)
    return time.perf_counter() - start
