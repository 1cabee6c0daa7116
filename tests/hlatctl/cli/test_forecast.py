"""`forecast`: a table for people, JSON for programs, a figure, and nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hlatctl.cli.main import main

SMALL = ["model=llama_tiny", "train.max_steps=200", "checkpoint.every_steps=40", "eval.enabled=false"]


def test_a_forecast_is_a_table_of_variants_and_leaves_only_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path / "runs"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    figure = tmp_path / "simulations.svg"
    assert main(["forecast", *SMALL, "--seeds", "1", "--json", "--figure", os.fspath(figure)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["simulated"] is True
    assert list(record["variants"]) == [
        "as configured",
        "checkpoint.every_steps=10",
        "checkpoint.every_steps=160",
        "rehearsal.start_s=960",
        "recovery.enabled=false",
    ]
    assert record["variants"]["as configured"]["courses"] == 1
    assert "as configured" in figure.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [figure]


def test_a_forecast_checks_its_configuration_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "train.global_batch_size=7", "cluster.processes_per_node=2"]) == 10
    assert "train.global_batch_size=7: not divisible" in capsys.readouterr().err
