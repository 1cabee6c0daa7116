"""A running job is profiled through the command line, without a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlatctl.run.fold import read_state
from hlatctl.run.paths import table_name, trace_name
from tests.e2e.conftest import Paced
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def test_a_running_job_is_profiled_without_a_restart(tmp_path: Path) -> None:
    cli = Paced(tmp_path)
    driver = cli.start_train("profiled", "train.max_steps=1000000", "train.tokens=1T", "checkpoint.every_steps=100000")
    try:
        wait_for(lambda: driver.poll() is not None or cli.events("profiled", "step"))
        made = cli.run("profile", "profiled", "--steps", "2", "--ranks", "all", "--no-memory")
        assert made.returncode == 0, made.stderr
        assert "ProfilerStep*" in made.stdout
        assert "profile 1: asked training for 2 steps of 2 ranks" in made.stderr
        refused = cli.run("profile", "profiled", "--ranks", "7")
        assert "the run has ranks 0 to 1" in refused.stderr
    finally:
        cli.run("stop", "profiled")
        driver.communicate()
    run = cli.paths("profiled")
    names = {name(rank) for name in (trace_name, table_name) for rank in (0, 1)}
    assert {path.name for path in run.profile(1).iterdir()} == names
    state = read_state(run)
    assert [(attempt.cause, attempt.resumed_from_step) for attempt in state.attempts] == [("stopped", 0)]
    assert f"profile 1    steps {state.profiles[0].first_step:,} to" in cli.run("status", "profiled").stdout
    refused = cli.run("profile", "profiled")
    assert "no driver is running" in refused.stderr
