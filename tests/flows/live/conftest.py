"""A page over a folder of runs, asked without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from flows.live.app import Service, make_app
from flows.live.stream import Watcher
from flows.tracking import ui
from hlatctl.report.live.index import LiveIndex
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import SweepPaths, trial_id
from tests.hlatctl.conftest import MakeRun, make_run

__all__ = ["make_run"]

TOKEN, PORT = "t" * 43, 8400
OWN = f"http://127.0.0.1:{PORT}"


@dataclass
class Page:
    """The page's index, and a browser that has opened its link."""

    index: LiveIndex
    browser: TestClient
    runs_dir: Path


MakePage = Callable[..., Page]


def make_sweep(runs_dir: Path, sweep_id: str, values: Mapping[int, float | None]) -> SweepPaths:
    """Write the journal of a sweep over learning rates, with a trial for each value; None: it was pruned."""
    sweep = SweepPaths(runs_dir / sweep_id)
    sweep.root.mkdir()
    sweep.space.write_text("{}\n", encoding="utf-8")
    axes = [{"key": "optimizer.lr", "values": ["0.001"], "low": None, "high": None, "log": False, "integer": False}]
    count: dict[str, Any] = {"axes": axes, "settings": {}, "arms": len(values), "trials": len(values)}
    with JournalWriter(sweep, "flow") as journal:
        journal.append(
            "sweep_created", sweep_id=sweep_id, simulated=False, argv=[], folder="", overrides=[],
            objective="validation_loss", direction="min", accelerators=False, plan={}, **count,
        )  # fmt: skip
        for number, value in values.items():
            run_id, point = trial_id(sweep_id, number), {"optimizer.lr": f"{(number + 1) / 1000}"}
            fields: dict[str, Any] = {"trial": number, "run_id": run_id}
            journal.append("trial_asked", arm=number, point=point, seed=None, overrides=[], **fields)
            journal.append("trial_started", **fields)
            for tokens in (1000, 2000):
                journal.append("trial_rung", trial=number, tokens=tokens, value=5 - tokens / 1000)
            journal.append(
                "trial_ended", trial=number, outcome="finished" if value else "pruned", why="", value=value,
                tokens=2000, process_hours=1.0, saved_process_hours=0.0,
            )  # fmt: skip
        journal.append("sweep_finished", outcome="finished", message="")
    return sweep


def states() -> dict[str, dict[str, object]]:
    return {name: {**ui.OFF, "auth": None} for name in ui.NAMES}


@pytest.fixture
def make_page(tmp_path: Path) -> MakePage:
    def make(*, allow_control: bool = False, logged_in: bool = True) -> Page:
        index = LiveIndex(tmp_path / "runs")
        index.poll()
        service = Service(Watcher(index), states, allow_control)
        browser = TestClient(make_app(service, token=TOKEN, port=PORT), base_url=OWN, raise_server_exceptions=False)
        if logged_in:
            assert browser.get(f"/?token={TOKEN}").status_code == 200
        return Page(index, browser, index.runs_dir)

    return make


@pytest.fixture
def page(make_run: MakeRun, make_page: MakePage) -> Page:
    """A page with a finished run ``a`` and an interrupted one ``b``."""
    make_run("a")
    make_run("b", until="killed")
    return make_page()
