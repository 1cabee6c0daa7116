"""The folder of the runs that commands name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path / "runs"))
    return tmp_path / "runs"
