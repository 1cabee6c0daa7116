"""How `status` shows milestones that wait."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hlatctl.cli.main import main
from hlatctl.run.journal import JournalWriter
from hlatctl.run.lease import hold_driver
from tests.hlatctl.conftest import MakeRun


def test_status_shows_the_queue_of_a_run_with_a_driver_and_without(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("one", until="killed")

    def status(*flags: str) -> str:
        assert main(["status", "one", *flags]) == 0
        return capsys.readouterr().out

    def show() -> Any:
        return json.loads(status("--json"))["evaluation_queue"]

    before = show()
    with JournalWriter(run, "flow", 1) as journal, hold_driver(run):
        journal.append("milestone", milestone_tokens=1_666_666, tokens=1_671_168, step=204)
        waiting = show()
        assert set(waiting["waiting"]) - set(before["waiting"]) == {1_666_666}
        assert "evaluation waits" in status()
