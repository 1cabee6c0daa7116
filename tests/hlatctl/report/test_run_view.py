"""The status of a run: what its journal says, and whether a process drives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.load import dump
from conf.schema import Config
from hlatctl.report.run_view import view_run
from hlatctl.run import files
from hlatctl.run.journal import JournalWriter
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun


@pytest.mark.parametrize(
    ("events", "driven", "undriven"),
    [
        ([], "running", "created"),
        (["head_started"], "running", "interrupted"),
        (["head_started", "stop_requested"], "stopping", "stopped"),
        (["head_started", "attempt_started", "stop_requested"], "stopping", "interrupted"),
        (["head_started", "attempt_started", "stop_requested", "train_stopped"], "stopping", "stopped"),
        (["head_started", "stop_requested", "head_started"], "running", "interrupted"),
        (["head_started", "run_finished"], "finished", "finished"),
    ],
)
def test_the_status_follows_from_the_journal_and_the_driver(
    events: list[str], driven: str, undriven: str, tmp_path: Path
) -> None:
    """A driver that stops on a full disk can't write ``run_finished``."""
    run = RunPaths(tmp_path / "run")
    files.write_text(run.config, dump(Config()))
    with JournalWriter(run, "flow") as journal:
        for kind in events:
            journal.append(kind, reason="stop")
    assert view_run(run).status == undriven
    with hold_driver(run):
        assert view_run(run).status == driven


def test_an_unreadable_configuration_makes_a_run_damaged(make_run: MakeRun) -> None:
    run = make_run()
    run.config.write_bytes(b"\xff\xfe{")
    view = view_run(run)
    assert view.status == "damaged"
    assert "not readable as YAML" in view.problem
    assert view.state.step == 306
