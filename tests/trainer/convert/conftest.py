"""A small run that has been trained, with checkpoints of steps 8, 16 and 24."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hlatctl.run.paths import RunPaths


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., RunPaths]) -> RunPaths:
    from trainer.__main__ import main

    run = make_run(
        tmp_path_factory.mktemp("export") / "run", optimizer={"ema_decay": 0.9}, model={"mup_base_width": 16}
    )
    assert main(["--run-dir", os.fspath(run.root), "--attempt", "1"]) == 0
    return run


@pytest.fixture
def copied(trained: RunPaths, tmp_path: Path) -> RunPaths:
    shutil.copytree(trained.root, tmp_path / "run")
    return RunPaths(tmp_path / "run")
