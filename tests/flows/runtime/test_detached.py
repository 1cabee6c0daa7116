"""Drivers as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.runtime import detached, spawn
from hlatctl.run.errors import LaunchError
from hlatctl.run.paths import RunPaths

pytestmark = pytest.mark.processes


def test_a_driver_that_does_not_start_in_time_does_not_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, beside = list[subprocess.Popen[bytes]](), spawn.beside

    def noted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(beside(*args, **options))
        return started[-1]

    monkeypatch.setattr(spawn, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(spawn, "beside", noted)
    monkeypatch.setattr(detached, "_START_TIMEOUT_S", 0.1)
    with pytest.raises(LaunchError, match=r"no driver after 0\.1 s"):
        detached.start_driver(RunPaths(tmp_path / "run"))
    assert started[0].returncode == -9
