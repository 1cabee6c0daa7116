"""Fixtures of the flow tests: a small configuration and a recording observer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import Config
from flows.runtime.driver import Observer
from hlatctl.run.state import RunState


class Recorder(Observer):
    """An observer that records messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def update(self, state: RunState, config: Config) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `tracking=none`, a run reports to Prefect only if the environment names a server."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of runs contain everything but their figures, which take most of a dry run's time."""
    monkeypatch.setattr("hlatctl.report.build.figures", lambda record: [])


@pytest.fixture
def simulated_config(composed: Config, tmp_path: Path) -> Config:
    return dataclasses.replace(composed, runs_dir=str(tmp_path / "runs"))


@pytest.fixture(scope="session")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The configuration of most tests here, composed once: that takes longer than many of them."""
    return compose(
        [
            "cluster=simulated",
            "tracking=none",
            "recovery.backoff_s=0",
            f"runs_dir={tmp_path_factory.mktemp('composed')}",
            "train.tokens=2.5M",
            "train.global_batch_size=16",
            "train.seq_len=512",
            "checkpoint.every_steps=50",
            "eval.every_tokens=833333",
        ]
    )
