"""`forecast`: a table for people, JSON for programs, a figure, and nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conf.schema import Config, SimulationConfig
from flows.forecast import variants
from hlatctl.cli.main import main
from hlatctl.report.forecast import Simulation


def played(config: Config, settings: SimulationConfig, seeds: int, say: object) -> dict[str, list[Simulation]]:
    """Long simulations of a large run, in the place of real ones."""
    one = Simulation(
        seed=1,
        message="",
        wall_s=200.9 * 86400,
        uptime_fraction=0.99123,
        goodput_fraction=0.96123,
        lost_s=35.5 * 3600,
        failures=120,
        cost_usd=6_102_570.0,
    )
    return {name: [one] * seeds for name in variants(config, settings)}


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
        "simulation.start_s=960",
        "recovery.enabled=false",
    ]
    assert record["variants"]["as configured"]["courses"] == 1
    assert "as configured" in figure.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [figure]


def test_the_table_fits_100_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flows.forecast.play_all", played)
    assert main(["forecast", "experiment=hlat_7b", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["VARIANT", "DURATION", "P95", "UPTIME", "GOODPUT", "LOST", "WORK", "FAILURES", "USD"]
    assert max(map(len, lines)) <= 100
    assert "simulated             2 simulations of each of 7 variants, 14 in all" in lines


def test_a_forecast_checks_its_configuration_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "train.global_batch_size=7", "cluster.processes_per_node=2"]) == 10
    assert "train.global_batch_size=7: not divisible" in capsys.readouterr().err
