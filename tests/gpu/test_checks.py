"""The checks and runs of ``python -m benchmarks gpu`` on this machine's GPU, and one check on a CPU.

On a CPU, the benchmark itself runs all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_cases
from benchmarks.gpu_checks import CHECKS, gradients, prepare
from benchmarks.gpu_runs import RUNS
from tests.trainer.conftest import ROOT

_LIMIT_S = 300


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def prepared_for_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    gpu_cases.prepare(folder, "cuda")
    return folder


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.processes
@needs_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_training_on_a_gpu_is_right(name: str, prepared: Path) -> None:
    _succeeds("gpu_checks", name, prepared)


@pytest.mark.processes
@needs_gpu
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_survives(name: str, prepared_for_runs: Path) -> None:
    _succeeds("gpu_runs", name, prepared_for_runs)


def _succeeds(module: str, name: str, folder: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}", name, "cuda", os.fspath(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    if reason := json.loads(done.stdout.splitlines()[-1]).get("skipped"):
        pytest.skip(reason)


def test_losses_and_gradients_are_compared_with_those_of_fp32(prepared: Path) -> None:
    figures = gradients("cpu", prepared)
    assert (figures["fp32_off"], figures["fp32_loss_off"]) == (0.0, 0.0)
    assert 0.0 < figures["mixed_off"] < 0.03
    assert json.dumps(figures)
