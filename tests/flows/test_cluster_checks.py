"""The short runs of `hlatctl doctor --neuron`: a command of hlatctl in a process of its own, as a check."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.schema import BackendConfig, Config
from flows import cluster_checks
from flows.cluster_checks import run_command
from hlatctl.run.errors import LaunchError

pytestmark = pytest.mark.processes


def test_a_command_is_a_check_that_shows_the_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hlatctl.py").write_text("raise SystemExit('the working directory is not searched')")
    monkeypatch.chdir(tmp_path)
    passed = run_command("version", ["--version"], "it starts")
    assert (passed.status, passed.shows, passed.command) == ("pass", "it starts", "hlatctl --version")
    failed = run_command("status", ["status", "missing", "--runs-dir", os.fspath(tmp_path)], "it is there")
    assert (failed.status, failed.shows) == ("fail", f"error: missing: there is no run in {tmp_path}")
    assert failed.values["wall_s"] > 0


def test_a_pytorch_that_can_not_be_imported_fails_one_check_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str, config: Config) -> str:
        raise LaunchError(f"{module}: failed (OSError: libcudart.so.12)")

    monkeypatch.setattr(cluster_checks, "_ask", broken)
    config = Config(backend=BackendConfig(device="cuda"))
    (check,) = cluster_checks.check_devices(config)
    assert (check.status, check.shows) == ("fail", "trainer.gpu_node: failed (OSError: libcudart.so.12)")
