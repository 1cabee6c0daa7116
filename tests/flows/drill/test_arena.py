"""A drill leaves no run behind that still has a driver."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import conf.load
from conf.schema import Config
from flows.drill.arena import Arena
from hlatctl.run import files, processes
from hlatctl.run.journal import DRILL_WRITER, FLOW_WRITER, JournalWriter
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

_DEAF = """
import sys, time
from pathlib import Path
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
with hold_driver(RunPaths(Path(sys.argv[1]))):
    time.sleep(600)
"""


def test_a_driver_that_does_not_obey_a_stop_is_killed(
    composed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = dataclasses.replace(composed.cluster, launcher="local")
    run = RunPaths(tmp_path / "drilled")
    run.root.mkdir(mode=0o700)
    files.write_text(run.config, files.seal_lines(conf.load.dump(dataclasses.replace(composed, cluster=cluster))))
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id="drilled", simulated=False)
    monkeypatch.setattr("flows.drill.arena._STOP_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", _DEAF, os.fspath(run.root)], env=processes.child_environment()
    ) as driver:
        try:
            wait_for(lambda: driver_pid(run) == driver.pid)
            with JournalWriter(run, DRILL_WRITER) as journal:
                Arena(run, journal).stop()
            assert driver.wait() == -9
        finally:
            driver.kill()
    assert driver_pid(run) is None
