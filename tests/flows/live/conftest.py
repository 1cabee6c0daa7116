"""A page over a folder of runs, asked without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from flows.live.app import Service, make_app
from flows.live.stream import Watcher
from flows.tracking import ui
from hlatctl.report.live.index import LiveIndex
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
