"""The checks of ``python -m benchmarks gpu`` on this machine's GPU, and one on a CPU, so that they keep working."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_checks import CHECKS, gradients, prepare
from tests.trainer.conftest import ROOT

_LIMIT_S = 300


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    prepare(folder)
    return folder


@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_training_on_a_gpu_is_right(name: str, prepared: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_checks", name, "cuda", os.fspath(prepared)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_losses_and_gradients_are_compared_with_those_of_fp32(prepared: Path) -> None:
    figures = gradients("cpu", prepared)
    assert (figures["fp32_off"], figures["fp32_loss_off"]) == (0.0, 0.0)
    assert 0.0 < figures["mixed_off"] < 0.03
    assert json.dumps(figures)
